// The second kernel of a forward whose keys are split: what the parts have found becomes the output.
//
// With the maximum m and the sum l of each part's scores, and its output O relative to m, a row has
//   out = Σ e^(mₚ − m)·Oₚ / Σ e^(mₚ − m)·lₚ,   m = max mₚ:
// the step of an online softmax, taken over parts instead of tiles.
#pragma once

#include "sm80/forward.h"

namespace flashsdk::sm80 {

inline constexpr int kJoinThreads = 128;

// A thread block a row: (row, head, batch). Its warps share out the parts, a warp's lanes the columns, by four.
template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(kJoinThreads)
    join_parts_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ KeySplit split) {
  using Element = typename Traits::Element;
  constexpr int kWarps = kJoinThreads / 32, kPieces = ceil_div(Traits::kHeadDim, 4 * 32);
  constexpr unsigned kAll = 0xffffffffu;
  const int row = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SeqlenInfo seq(p, batch);
  if (row >= seq.seqlen_q) return;
  const std::int64_t first = split.row(0, batch, head, row);
  const RowState* states = split.states + first;
  const float* parts = split.out + first * split.columns;
  const float unit = ForwardScores<Traits, Policy, kFeatures>::scale_first(p.score) ? 1.f : p.score.softmax_scale;
  const auto weight_of = [&](const RowState& part, float max) {
    return cuda::exp2_approx(unit * cuda::kLog2e * (part.max - (max == -INFINITY ? 0.f : max)));
  };

  RowState all{-INFINITY, 0.f};
  for (int part = lane; part < split.parts; part += 32) all.max = fmaxf(all.max, states[part * split.rows].max);
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) all.max = fmaxf(all.max, __shfl_xor_sync(kAll, all.max, step));
  for (int part = lane; part < split.parts; part += 32) {
    const RowState state = states[part * split.rows];
    all.sum += weight_of(state, all.max) * state.sum;
  }
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(kAll, all.sum, step);

  __shared__ float4 sums[kWarps][kPieces][32];
  CUTE_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    const int column = 4 * (32 * piece + lane);
    float4 sum{0.f, 0.f, 0.f, 0.f};
#pragma unroll 4
    for (int part = warp; part < split.parts; part += kWarps) {
      const float weight = weight_of(states[part * split.rows], all.max);
      if (column >= split.columns) continue;
      const float4 x = *reinterpret_cast<const float4*>(parts + part * split.rows * split.columns + column);
      sum = {fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z), fmaf(weight, x.w, sum.w)};
    }
    sums[warp][piece][lane] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const float factor = all.sum == 0.f ? 0.f : cuda::reciprocal(all.sum);
    Element* out = seq.head_q<Element>(p.out, batch, head) + row * p.out.row;
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = 4 * (32 * piece + lane);
      float4 sum = sums[0][piece][lane];
      CUTE_UNROLL
      for (int other = 1; other < kWarps; ++other) {
        const float4 x = sums[other][piece][lane];
        sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      }
      if (column < split.columns) {
        const uint2 words{cuda::pack<Element>(sum.x * factor, sum.y * factor),
                          cuda::pack<Element>(sum.z * factor, sum.w * factor)};
        *reinterpret_cast<uint2*>(out + column) = words;
      }
    }
    if (lane == 0) seq.rows(p.lse, batch, head)[row * p.lse.row] = cuda::log_sum_exp(all.max, all.sum, unit);
  }
}

}  // namespace flashsdk::sm80
