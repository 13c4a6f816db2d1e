// Where only the device knows the lengths of sequences, and they may be unequal: how a forward's keys are dealt to
// parts that take about as long. Each thread block plans the same for itself as it starts, which takes less time than a
// kernel ahead would. A sequence is cut into parts of equal length, as many as keep each within a limit; of the limits
// that are tried, the one that takes the least time (PlanProblem).
#pragma once

#include <climits>

#include <cute/tensor.hpp>

#include "sm80/key_split.h"

namespace flashsdk::sm80 {

// Shared memory that planning takes: the tiles of each sequence, and of each warp and limit two sums.
constexpr int plan_smem_bytes(int threads) {
  return static_cast<int>(sizeof(int)) * (kMostPlanned + 2 * (threads / 32) * kTriedLimits);
}

// The part that has this place among all. Of all threads; `shared` is free again afterwards. One thread block of the
// grid also writes where the parts of each sequence end, for the kernel that joins them.
__device__ __forceinline__ KeyPart planned_part(const ForwardParams& p, const KeySplit& split, int place, int* shared) {
  constexpr unsigned kAll = 0xffffffffu;
  static_assert(kTriedLimits == 32, "a lane tries each");
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  int* const tiles_of = shared;
  int *const parts_of = shared + p.batch + lane, *const longest_of = parts_of + 32 * warps;  // of a warp's sequences
  for (int b = static_cast<int>(threadIdx.x); b < p.batch; b += static_cast<int>(blockDim.x))
    tiles_of[b] = split.plan.tiles_of(p, b);
  __syncthreads();

  int longest = 0, tiles = 0;
  for (int b = lane; b < p.batch; b += 32) {
    longest = max_of(longest, tiles_of[b]);
    tiles += tiles_of[b];
  }
  longest = __reduce_max_sync(kAll, longest);
  tiles = __reduce_add_sync(kAll, tiles);
  const int tried = tried_limit(lane, longest, split.parts);
  int parts = 0, longest_part = 0;
  for (int b = warp; b < p.batch; b += warps) {
    const PartCut cut = PartCut::of(tiles_of[b], tried);
    parts += cut.parts;
    longest_part = max_of(longest_part, cut.longest);
  }
  parts_of[32 * warp] = parts;
  longest_of[32 * warp] = longest_part;
  __syncthreads();
  parts = 0;
  for (int i = 0; i < warps; ++i) {
    parts += parts_of[32 * i];
    longest_part = max_of(longest_part, longest_of[32 * i]);
  }
  const auto each = static_cast<float>(split.heads * split.plan.tiles_of_head);  // as many thread blocks a part
  const float time = split.plan.time(static_cast<float>(parts) * each, static_cast<float>(tiles) * each, longest_part);
  // Positive floats are in the order of their bits.
  const unsigned rank = parts <= split.slots ? __float_as_uint(time) : ~0u, least = __reduce_min_sync(kAll, rank);
  const int limit = __reduce_min_sync(kAll, rank == least ? tried : INT_MAX);

  const bool writes = split.ends != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && warp == 0;
  KeyPart found{0, 0, 0, 0};
  int before = 0;  // parts of the sequences of the turns so far
  for (int first = 0; first < p.batch && (writes || found.parts == 0); first += 32) {
    const int b = first + lane, own = b < p.batch ? PartCut::of(tiles_of[b], limit).parts : 0;
    int end = own;  // and of those before this one
    CUTE_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(kAll, end, step);
      if (lane >= step) end += other;
    }
    end += before;
    if (writes && b < p.batch) split.ends[b] = end;
    const unsigned behind = __ballot_sync(kAll, place < end);
    if (found.parts == 0 && behind != 0) {
      const int of = __ffs(static_cast<int>(behind)) - 1;
      const int count = __shfl_sync(kAll, own, of);
      found = {first + of, place - (__shfl_sync(kAll, end, of) - count), count, place};
    }
    before = __shfl_sync(kAll, end, 31);
  }
  __syncthreads();
  return found;
}

}  // namespace flashsdk::sm80
