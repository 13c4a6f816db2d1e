// The online softmax of FlashAttention over accumulator fragments whose rows are shared by four lanes.
#pragma once

#include <cute/tensor.hpp>

#include "cuda/math.h"

namespace flashsdk::cuda {

template <int kRows>
class OnlineSoftmax {
 public:
  // scale: from the scores' unit to that of log2; positive.
  __device__ explicit OnlineSoftmax(float scale) : scale_(scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.f;
    }
  }

  // Turns a tile's scores into exp2(scale·(score − max)), adds them to the row sums, and brings `out` to the same max.
  //
  // The max is only raised when some row's grew by more than 2^kSlack: until then the probabilities just exceed 1,
  // which changes nothing in floating point, and the multiplication of `out` is saved.
  template <class Scores, class Out>  // both ((2, M), (2, N))
  __device__ void step(Scores& scores, Out& out) {
    constexpr float kSlack = 8.f;
    float tile_max[kRows];
    bool grows = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float m = scores(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < cute::size<1>(scores); ++j) m = fmaxf(m, scores(i, j));
      tile_max[i] = quad_max(m);
      grows |= scale_ * tile_max[i] > scale_ * max_[i] + kSlack;
    }
    branch_if(__any_sync(0xffffffffu, grows) != 0, [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float m = fmaxf(max_[i], tile_max[i]);
        float factor = exp2_approx(scale_ * (max_[i] - finite(m)));
        max_[i] = m;
        sum_[i] *= factor;
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(out); ++j) out(i, j) *= factor;
      }
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float offset = scale_ * finite(max_[i]);
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(fmaf(scores(i, j), scale_, -offset));
        sum_[i] += scores(i, j);
      }
    }
  }

  // Call once, after the last tile. Rows that saw nothing have sum 0 and lse −inf.
  __device__ void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) sum_[i] = quad_sum(sum_[i]);
  }
  __device__ float inverse_sum(int i) const { return sum_[i] == 0.f ? 0.f : 1.f / sum_[i]; }
  __device__ float lse(int i) const { return sum_[i] == 0.f ? -INFINITY : (scale_ * max_[i]) * kLn2 + logf(sum_[i]); }

 private:
  static __device__ float finite(float m) { return m == -INFINITY ? 0.f : m; }

  float scale_;
  float max_[kRows], sum_[kRows];
};

}  // namespace flashsdk::cuda
