// The rows of a tile of few rows on their way out: as what one part of the keys has found, or as output from all parts.
#pragma once

#include "sm80/forward.h"

namespace flashsdk::sm80 {

template <class Traits, cuda::Features kFeatures>
class RowJoin {
  using Element = typename Traits::Element;
  static constexpr unsigned kAllLanes = 0xffffffffu;

 public:
  __device__ RowJoin(const ForwardParams& p, const SeqlenInfo& seq, const cuda::TileWork& work, const KeySplit& split,
                     const cuda::ScoreUnit& unit, int m0)
      : p_(p), seq_(seq), work_(work), split_(split), unit_(unit), m0_(m0) {}

  // What sums relative to `max` are multiplied by to be relative to `most`, which is not less.
  __device__ float weight(float max, float most) const {
    return cuda::exp2_approx(unit_.to_log2() * (max - (most == -INFINITY ? 0.f : most)));
  }
  // Four columns of a row as output. sum: relative to all.max.
  __device__ void write(int row, int column, const float4& sum, const RowState& all) const {
    const int query = split_.shared.query(m0_ + row), head = split_.shared.head(work_.head, m0_ + row);
    const cuda::RowEnd end = cuda::end_of_row(all.max, all.sum, unit_.to_natural(), p_.sink.of(head, query));
    const float factor = end.factor * scale_of_out<Element, kFeatures>(p_.score);
    Element* out = seq_.template head_q<Element>(p_.out, work_.batch, head) + query * p_.out.row + column;
    *reinterpret_cast<uint2*>(out) = {cuda::pack<Element>(sum.x * factor, sum.y * factor),
                                      cuda::pack<Element>(sum.z * factor, sum.w * factor)};
    if (column == 0) seq_.rows(p_.lse, work_.batch, head)[query * p_.lse.row] = end.lse;
  }
  // The same for whoever joins the parts.
  __device__ void leave(int slot, int row, int column, const float4& sum, const RowState& all) const {
    const std::int64_t at = place(slot, row);
    *reinterpret_cast<float4*>(split_.out + at * split_.columns + column) = sum;
    if (column == 0) split_.states[at] = all;
  }
  // All parts have left what they have found of `rows` rows. A warp has a row, and reads some parts of it at once.
  __device__ void join(const KeyPart& part, int rows) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int row = static_cast<int>(threadIdx.x) / 32; row < rows; row += Traits::kWarps) {
      const auto place_of = [&](int i) { return place(split_.slot_beside(part, i), row); };
      RowState states[kLaneStates], all{-INFINITY, 0.f};  // dealt to the lanes
      CUTE_UNROLL
      for (int i = 0; i < kLaneStates; ++i) {
        const int of = 32 * i + lane;
        states[i] = {-INFINITY, 0.f};
        if (of < part.parts) {
          const float2 state = __ldcg(reinterpret_cast<const float2*>(split_.states + place_of(of)));
          states[i] = {state.x, state.y};
        }
        all.max = fmaxf(all.max, states[i].max);
      }
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) all.max = fmaxf(all.max, __shfl_xor_sync(kAllLanes, all.max, step));
      float4 sum[kPieces] = {};
#pragma unroll 1
      for (int i = 0; 32 * i < part.parts; ++i) {
        RowState state = states[0];
        CUTE_UNROLL
        for (int k = 1; k < kLaneStates; ++k)
          if (k == i) state = states[k];
        const float own = weight(state.max, all.max);
        all.sum += own * state.sum;
        for (int first = 0; first < min_of(32, part.parts - 32 * i); first += kTogether) {
          float4 x[kTogether][kPieces];
          CUTE_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            const int of = 32 * i + first + j;
            const float* out = split_.out + place_of(of) * split_.columns;
            CUTE_UNROLL
            for (int piece = 0; piece < kPieces; ++piece) {
              const int column = 4 * (32 * piece + lane);
              x[j][piece] = of < part.parts && column < split_.columns
                                ? __ldcg(reinterpret_cast<const float4*>(out + column))
                                : float4{0.f, 0.f, 0.f, 0.f};
            }
          }
          CUTE_UNROLL
          for (int j = 0; j < kTogether; ++j) {
            const float factor = __shfl_sync(kAllLanes, own, (first + j) % 32);
            CUTE_UNROLL
            for (int piece = 0; piece < kPieces; ++piece) {
              const float4 y = x[j][piece];
              float4& to = sum[piece];
              to = {fmaf(factor, y.x, to.x), fmaf(factor, y.y, to.y), fmaf(factor, y.z, to.z), fmaf(factor, y.w, to.w)};
            }
          }
        }
      }
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) all.sum += __shfl_xor_sync(kAllLanes, all.sum, step);
      CUTE_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        const int column = 4 * (32 * piece + lane);
        if (column < split_.columns) write(row, column, sum[piece], all);
      }
    }
  }

 private:
  static constexpr int kPieces = ceil_div(Traits::kHeadDim, 4 * 32), kLaneStates = ceil_div(kMostKeyParts, 32);
  static constexpr int kTogether = 8 / kPieces;

  __device__ std::int64_t place(int slot, int row) const { return split_.row(slot, work_.head, m0_ + row); }

  const ForwardParams& p_;
  const SeqlenInfo& seq_;
  const cuda::TileWork& work_;
  const KeySplit& split_;
  const cuda::ScoreUnit& unit_;
  int m0_;
};

}  // namespace flashsdk::sm80
