// The second kernel of a forward whose keys are split: what the parts have found becomes the output.
//
// With the maximum m and the sum l of each part's scores, and its output O relative to m, a row has
//   out = Σ e^(mₚ − m)·Oₚ / Σ e^(mₚ − m)·lₚ,   m = max mₚ:
// the step of an online softmax, taken over parts instead of tiles.
#pragma once

#include "sm80/forward.h"

namespace flashsdk::sm80 {

// A warp reads its parts at once, so that all of a row's are on their way together.
inline constexpr int kPartsOfWarp = 4, kMostJoinWarps = ceil_div(kMostKeyParts, kPartsOfWarp);
inline int join_warps(int parts) { return ceil_div(parts, kPartsOfWarp); }

// Columns that a thread block joins: all but of wide heads, of which a row has several thread blocks.
inline constexpr int kMostJoinColumns = 256;
template <class Traits>
inline constexpr int kJoinsOfRow = ceil_div(Traits::kHeadDimV, kMostJoinColumns);

// A thread block of join_warps() a row, or some columns of one: (these, head of all batches). Its warps share out the
// parts, a warp's lanes the columns, by four.
template <class Traits, cuda::Features kFeatures>
__global__ void __launch_bounds__(32 * kMostJoinWarps)
    join_parts_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ KeySplit split) {
  using Element = typename Traits::Element;
  constexpr int kJoins = kJoinsOfRow<Traits>;
  constexpr int kPieces = ceil_div(min_of(Traits::kHeadDimV, kMostJoinColumns), 4 * 32);
  constexpr int kLaneStates = ceil_div(kMostKeyParts, 32);
  constexpr unsigned kAll = 0xffffffffu;
  const int row = blockIdx.x / kJoins, tile_head = blockIdx.y % split.heads, batch = blockIdx.y / split.heads;
  const int query = split.shared.query(row), head = split.shared.head(tile_head, row);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = static_cast<int>(blockIdx.x) % kJoins * kMostJoinColumns;
  cuda::wait_for_kernel_before();
  const SeqlenInfo seq(p, batch);
  if (query >= seq.seqlen_q) return;
  const int parts = split.count(batch);
  const auto place = [&](int part) { return split.row(split.slot(part, batch), tile_head, row); };
  const auto state_of = [&](int part) { return part < parts ? split.states[place(part)] : RowState{-INFINITY, 0.f}; };
  RowState states[kLaneStates], own_states[kPartsOfWarp];  // of the row's parts, dealt to the lanes; of the warp's
  float4 own[kPartsOfWarp][kPieces];
  CUTE_UNROLL
  for (int i = 0; i < kLaneStates; ++i) states[i] = state_of(32 * i + lane);
  CUTE_UNROLL
  for (int i = 0; i < kPartsOfWarp; ++i) {
    const int part = warp * kPartsOfWarp + i;
    const float* out = split.out + place(part) * split.columns;
    own_states[i] = state_of(part);
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = first_column + 4 * (32 * piece + lane);
      own[i][piece] = part < parts && column < split.columns ? *reinterpret_cast<const float4*>(out + column)
                                                             : float4{0.f, 0.f, 0.f, 0.f};
    }
  }

  const float unit = score_unit<kFeatures>(p.score).to_natural();
  RowState all{-INFINITY, 0.f};
  for (const RowState& state : states) all.max = fmaxf(all.max, state.max);
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) all.max = fmaxf(all.max, __shfl_xor_sync(kAll, all.max, step));
  const float reference = all.max == -INFINITY ? 0.f : all.max;
  const auto weight_of = [&](const RowState& state) {
    return cuda::exp2_approx(unit * cuda::kLog2e * (state.max - reference));
  };
  for (const RowState& state : states) all.sum += weight_of(state) * state.sum;
  CUTE_UNROLL
  for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(kAll, all.sum, step);

  __shared__ float4 sums[kMostJoinWarps][kPieces][32];
  CUTE_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    float4 sum{0.f, 0.f, 0.f, 0.f};
    CUTE_UNROLL
    for (int i = 0; i < kPartsOfWarp; ++i) {
      const float weight = weight_of(own_states[i]);
      const float4 x = own[i][piece];
      sum = {fmaf(weight, x.x, sum.x), fmaf(weight, x.y, sum.y), fmaf(weight, x.z, sum.z), fmaf(weight, x.w, sum.w)};
    }
    sums[warp][piece][lane] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const cuda::RowEnd end = cuda::end_of_row(all.max, all.sum, unit, p.sink.of(head, query));
    const float factor = end.factor * scale_of_out<Element, kFeatures>(p.score);
    Element* out = seq.head_q<Element>(p.out, batch, head) + query * p.out.row;
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      const int column = first_column + 4 * (32 * piece + lane);
      float4 sum = sums[0][piece][lane];
      for (int other = 1; other < static_cast<int>(blockDim.x) / 32; ++other) {
        const float4 x = sums[other][piece][lane];
        sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      }
      if (column < split.columns) {
        const uint2 words{cuda::pack<Element>(sum.x * factor, sum.y * factor),
                          cuda::pack<Element>(sum.z * factor, sum.w * factor)};
        *reinterpret_cast<uint2*>(out + column) = words;
      }
    }
    if (lane == 0 && first_column == 0) seq.rows(p.lse, batch, head)[query * p.lse.row] = end.lse;
  }
}

}  // namespace flashsdk::sm80
