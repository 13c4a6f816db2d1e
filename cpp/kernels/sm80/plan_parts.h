// A kernel of one thread block ahead of a forward whose keys are split: deals the keys of sequences of unequal lengths,
// which only the device knows, to parts that take about as long. A sequence is cut into parts of equal length, as many
// as keep each within a limit; of the limits that are tried, the one that planned_time() says is fastest.
#pragma once

#include "cuda/host/launch.h"
#include "sm80/key_split.h"

namespace flashsdk::sm80 {

// What planning asks of a call and its device.
struct PlanProblem {
  int tile_keys, most_keys;  // of a tile; that a query sees
  int multiprocessors, blocks_each;
  int tiles_of_head;  // of queries

  // Without a query nobody reads the keys.
  FLASHSDK_HD int tiles_of(const ForwardParams& p, int batch) const {
    const SeqlenInfo seq(p, batch);
    return seq.seqlen_q > 0 ? ceil_div(min_of(seq.seqlen_k, most_keys), tile_keys) : 0;
  }
};

inline constexpr int kPlanThreads = 256, kPlanWarps = kPlanThreads / 32;

// Of all threads; shared: a place for each warp.
template <class F>
__device__ __forceinline__ int reduce_block(int value, int* shared, F&& join) {
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(0xffffffffu, value, step));
  __syncthreads();
  shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[0];
  for (int i = 1; i < kPlanWarps; ++i) value = join(value, shared[i]);
  return value;
}

// The limit to the tiles of a part. Eight lanes try each.
__device__ __forceinline__ int best_limit(const ForwardParams& p, const KeySplit& split, const PlanProblem& problem) {
  constexpr int kLanes = kPlanThreads / kTriedLimits;
  constexpr auto kAdd = [](int a, int b) { return a + b; };
  constexpr auto kMost = [](int a, int b) { return max_of(a, b); };
  __shared__ int of_warps[kPlanWarps];
  __shared__ unsigned long long best;
  int longest = 0, tiles = 0;
  for (int b = threadIdx.x; b < p.batch; b += kPlanThreads) {
    const int own = problem.tiles_of(p, b);
    longest = max_of(longest, own);
    tiles += own;
  }
  if (threadIdx.x == 0) best = ~0ull;
  longest = reduce_block(longest, of_warps, kMost);
  tiles = reduce_block(tiles, of_warps, kAdd);

  const int limit = tried_limit(static_cast<int>(threadIdx.x) / kLanes, longest, split.parts);
  int parts = 0, longest_part = 0;
  for (int b = threadIdx.x % kLanes; b < p.batch; b += kLanes) {
    const PartCut cut = PartCut::of(problem.tiles_of(p, b), limit);
    parts += cut.parts;
    longest_part = max_of(longest_part, cut.longest);
  }
  CUTE_UNROLL
  for (int step = kLanes / 2; step > 0; step /= 2) {
    parts += __shfl_xor_sync(0xffffffffu, parts, step);
    longest_part = max_of(longest_part, __shfl_xor_sync(0xffffffffu, longest_part, step));
  }
  if (threadIdx.x % kLanes == 0 && parts <= split.slots) {
    const auto each = static_cast<float>(split.heads * problem.tiles_of_head);  // as many thread blocks a part
    const float time = planned_time(static_cast<float>(parts) * each, static_cast<float>(tiles) * each, longest_part,
                                    problem.multiprocessors, problem.blocks_each);
    // Positive floats are in the order of their bits.
    atomicMin(&best, static_cast<unsigned long long>(__float_as_uint(time)) << 32 | static_cast<unsigned>(limit));
  }
  __syncthreads();
  return static_cast<int>(best & 0xffffffffu);
}

// A template, as several files of kernels include it.
template <int kThreads = kPlanThreads>
__global__ void __launch_bounds__(kThreads)
    plan_parts_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ KeySplit split,
                      const __grid_constant__ PlanProblem problem) {
  cuda::allow_next_kernel();
  const int limit = best_limit(p, split, problem), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ int of_warps[kPlanWarps];
  int before = 0;  // slots of the sequences of the turns so far
  for (int first = 0; first < p.batch; first += kThreads) {
    const int b = first + threadIdx.x;
    const int parts = b < p.batch ? PartCut::of(problem.tiles_of(p, b), limit).parts : 0;
    int end = parts;  // and of those before this one
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += other;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = end;
    __syncthreads();
    int all = 0;
    for (int i = 0; i < kPlanWarps; ++i) {
      if (i < warp) end += of_warps[i];
      all += of_warps[i];
    }
    end += before;
    before += all;
    if (b >= p.batch) continue;
    split.ends[b] = end;
    for (int i = 0; i < parts; ++i) split.plan[end - parts + i] = {b, i, parts};
  }
}

}  // namespace flashsdk::sm80
