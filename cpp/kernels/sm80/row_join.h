// The rows of a tile of few rows on their way out: as what one part of the keys has found, or as output from all parts.
#pragma once

#include "sm80/forward.h"

namespace flashsdk::sm80 {

template <class Traits, cuda::Features kFeatures>
class RowJoin {
  using Element = typename Traits::Element;
  static constexpr int kPieces = ceil_div(Traits::kHeadDim, 4 * 32);  // a warp's lanes have four columns of each
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
  // Of `rows` rows, of which all parts have left what they have found. A warp joins up to four of its rows at once, so
  // that their parts come from memory together.
  __device__ void join(const KeyPart& part, int rows) const {
    const int warp = static_cast<int>(threadIdx.x) / 32, rows_of_warp = ceil_div(rows, Traits::kWarps);
    for (int first = warp; first < rows; first += 4 * Traits::kWarps) {
      if (rows_of_warp == 1) {
        join_rows<1>(part, first, rows);
      } else if (rows_of_warp == 2) {
        join_rows<2>(part, first, rows);
      } else {
        join_rows<4>(part, first, rows);
      }
    }
  }

 private:
  __device__ std::int64_t place(int slot, int row) const { return split_.row(slot, work_.head, m0_ + row); }

  // Rows first, first + kWarps and so on: a step of an online softmax, taken over 32 parts.
  template <int kRows>
  __device__ void join_rows(const KeyPart& part, int first, int rows) const {
    constexpr int kTogether = max_of(1, 8 / (kRows * kPieces));  // parts of each row
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const auto row_of = [&](int i) { return first + i * Traits::kWarps; };
    const auto place_of = [&](int i, int of_part) { return place(split_.slot_beside(part, of_part), row_of(i)); };
    float most[kRows], row_sum[kRows] = {};  // of all parts so far; of those that this lane has the states of
    float4 sum[kRows][kPieces] = {};         // relative to most
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) most[i] = -INFINITY;
    for (int part0 = 0; part0 < part.parts; part0 += 32) {
      const int count = min_of(32, part.parts - part0);
      float2 own[kRows];  // states
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i)
        own[i] = lane < count && row_of(i) < rows
                     ? __ldcg(reinterpret_cast<const float2*>(split_.states + place_of(i, part0 + lane)))
                     : float2{-INFINITY, 0.f};
      float weights[kRows];
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float most_before = most[i];
        most[i] = fmaxf(most[i], own[i].x);
        CUTE_UNROLL
        for (int step = 16; step > 0; step /= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(kAllLanes, most[i], step));
        const float before = weight(most_before, most[i]);
        weights[i] = weight(own[i].x, most[i]);
        row_sum[i] = before * row_sum[i] + weights[i] * own[i].y;
        CUTE_UNROLL
        for (float4& x : sum[i]) x = {before * x.x, before * x.y, before * x.z, before * x.w};
      }
      for (int j = 0; j < count; j += kTogether) {
        float4 x[kRows * kTogether][kPieces];
        CUTE_UNROLL
        for (int n = 0; n < kRows * kTogether; ++n) {
          const int i = n / kTogether, of_part = j + n % kTogether;
          const float* from = split_.out + place_of(i, part0 + of_part) * split_.columns;
          CUTE_UNROLL
          for (int piece = 0; piece < kPieces; ++piece) {
            const int column = 4 * (32 * piece + lane);
            const bool there = of_part < count && row_of(i) < rows && column < split_.columns;
            x[n][piece] = there ? __ldcg(reinterpret_cast<const float4*>(from + column)) : float4{0.f, 0.f, 0.f, 0.f};
          }
        }
        CUTE_UNROLL
        for (int n = 0; n < kRows * kTogether; ++n) {
          const int i = n / kTogether;
          const float factor = __shfl_sync(kAllLanes, weights[i], j + n % kTogether);
          CUTE_UNROLL
          for (int piece = 0; piece < kPieces; ++piece) {
            const float4 y = x[n][piece];
            float4& to = sum[i][piece];
            to = {fmaf(factor, y.x, to.x), fmaf(factor, y.y, to.y), fmaf(factor, y.z, to.z), fmaf(factor, y.w, to.w)};
          }
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int step = 16; step > 0; step /= 2) row_sum[i] += __shfl_xor_sync(kAllLanes, row_sum[i], step);
      CUTE_UNROLL
      for (int piece = 0; piece < kPieces; ++piece) {
        const int column = 4 * (32 * piece + lane);
        if (row_of(i) < rows && column < split_.columns) write(row_of(i), column, sum[i][piece], {most[i], row_sum[i]});
      }
    }
  }

  const ForwardParams& p_;
  const SeqlenInfo& seq_;
  const cuda::TileWork& work_;
  const KeySplit& split_;
  const cuda::ScoreUnit& unit_;
  int m0_;
};

}  // namespace flashsdk::sm80
