// The online softmax of FlashAttention over accumulator fragments whose rows are shared by four lanes.
#pragma once

#include <cfloat>
#include <type_traits>

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "common/params.h"
#include "cuda/tile/math.h"

namespace flashsdk::cuda {

// Whether the softmax may multiply by the scale inside the exponential. The running maximum needs a positive one, and
// scale·log2(e) must be finite; any other multiplies the scores first.
__device__ __forceinline__ bool scales_exponents(float scale) { return scale > 0.f && scale < kScaleLimit; }

// The unit of the scores that a softmax sees: that of products, which the exponents multiply by the softmax scale; or
// of natural logarithms, where scores are multiplied first, as more has been done to them or for that scale.
class ScoreUnit {
 public:
  // modified: what changes scores needs them multiplied.
  __device__ __forceinline__ ScoreUnit(const ScoreParam& score, bool modified)
      : score_(score), scale_first_(modified || !scales_exponents(score.softmax_scale)) {}

  __device__ __forceinline__ bool scale_first() const { return scale_first_; }
  __device__ __forceinline__ float to_natural() const { return scale_first_ ? 1.f : score_.softmax_scale; }
  __device__ __forceinline__ float to_log2() const { return to_natural() * kLog2e; }

 private:
  const ScoreParam& score_;
  bool scale_first_;
};

// An lse beyond float stays at its end, as −inf says that no key was seen.
__device__ __forceinline__ float finite_lse(float lse) {
  return fabsf(lse) > FLT_MAX ? copysignf(FLT_MAX, lse) : lse;  // NaN stays
}
// unit: from the scores' unit to that of the natural logarithm.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float unit) {
  return sum == 0.f ? -INFINITY : finite_lse(fmaf(max, unit, logf(sum)));
}

// What becomes of a row after its last tile: what its output is multiplied by, and its log-sum-exp.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd end_of_row(float max, float sum, float unit) {
  return {sum == 0.f ? 0.f : reciprocal(sum), log_sum_exp(max, sum, unit)};
}
// The same where a sink's logit joins the sum: relative to the larger of the two, so that nothing overflows. A row that
// saw nothing has the sink as its lse, to the last bit, which the backward asks for.
__device__ __forceinline__ RowEnd end_with_sink(float max, float sum, float unit, float sink) {
  if (sum == 0.f) return {0.f, sink};
  const float above = fmaf(-max, unit, sink);  // of the sink over the row's reference
  const float smaller = exp2_approx(-fabsf(above) * kLog2e);
  if (above > 0.f) {
    const float total = fmaf(sum, smaller, 1.f);
    return {smaller * reciprocal(total), finite_lse(sink + logf(total))};
  }
  const float total = sum + smaller;
  return {reciprocal(total), finite_lse(fmaf(max, unit, logf(total)))};
}
// sink: null where there is none.
__device__ __forceinline__ RowEnd end_of_row(float max, float sum, float unit, const float* sink) {
  return sink == nullptr ? end_of_row(max, sum, unit) : end_with_sink(max, sum, unit, *sink);
}

template <int kRows>
class OnlineSoftmax {
  static constexpr float kSlack = 8.f;
  // Up to this |scale·max| its rounding adds less than 1e-4 to the relative error of a probability.
  static constexpr float kMaxRounded = 1024.f;
  // A thread's sum over a row of a tile that a try may reach, by the type of the probabilities: half of fp16's largest.
  // bf16's largest is float's. 2^30 leaves Σ P·V of a million keys finite up to |V| = 2^80, and holds where a row's
  // maximum is 20 above what it is tried by, as where its first key outweighs all others.
  template <class Element>
  static constexpr float kMostTried = std::is_same_v<Element, cutlass::half_t> ? 0x1p15f : 0x1p30f;

 public:
  // scale: from the scores' unit to that of log2; positive.
  __device__ explicit OnlineSoftmax(float scale) : scale_(scale) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max_[i] = -INFINITY;
      sum_[i] = 0.f;
      offset_[i] = -INFINITY;
    }
  }

  // Turns a tile's scores into exp2(scale·(score − max)), adds them to the row sums, and brings `out` to the same max.
  //
  // The max is only raised when some row's grew by more than 2^kSlack: until then the probabilities just exceed 1,
  // which changes nothing in floating point, and the multiplication of `out` is saved.
  template <class Scores, class Out>  // both ((2, M), (2, N))
  __device__ void step(Scores& scores, Out& out) {
    float tile_max[kRows], factor[kRows];
    find_max(scores, tile_max);
    branch_if(exceeds(tile_max), [&] {
      raise(tile_max, factor);
      rescale(out, factor);
    });
    exponentiate(scores);
  }

  // The parts of a step, for kernels whose `out` is still being computed when the scores are ready.
  template <class Scores>
  static __device__ void find_max(const Scores& scores, float (&tile_max)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float m = scores(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < cute::size<1>(scores); ++j) m = fmaxf(m, scores(i, j));
      tile_max[i] = quad_max(m);
    }
  }
  // Whether some row of the warp has grown beyond the slack.
  __device__ bool exceeds(const float (&tile_max)[kRows]) const {
    bool grows = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) grows |= scale_ * (tile_max[i] - max_[i]) > kSlack;
    return __any_sync(0xffffffffu, grows) != 0;
  }
  // For other rows, whose first tile this is: the references are the maxima of a few of their scores, for a try.
  template <class Scores>
  __device__ void restart_by_some(const Scores& scores) {
    constexpr int kLast = decltype(cute::size<1>(scores))::value - 1;
    float some[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      some[i] = quad_max(fmaxf(fmaxf(scores(i, 0), scores(i, 1)), fmaxf(scores(i, kLast - 1), scores(i, kLast))));
    }
    restart_for_try(some);
  }
  // Likewise by all of their scores, of which some are known to be far above the others.
  template <class Scores>
  __device__ void restart_by_all(const Scores& scores) {
    float tile_max[kRows];
    find_max(scores, tile_max);
    restart_for_try(tile_max);
  }
  // For other rows, whose first tile this is.
  __device__ void restart(const float (&tile_max)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max_[i] = tile_max[i];
      sum_[i] = 0.f;
    }
  }
  // Raises the running maximum to that of the tile. `out` must then be multiplied by the factors.
  __device__ void raise(const float (&tile_max)[kRows], float (&factor)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float m = fmaxf(max_[i], tile_max[i]);
      factor[i] = exp2_approx(scale_ * (max_[i] - finite(m)));
      max_[i] = m;
      sum_[i] *= factor[i];
    }
  }
  template <class Out>
  static __device__ void rescale(Out& out, const float (&factor)[kRows]) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(out); ++j) out(i, j) *= factor[i];
    }
  }
  // Scores become exp2(scale·(score − max)) and are added to the row sums. One FMA is exact enough while scale·max is
  // small. Beyond, its rounding would be apart from that of scale·score by more than any exponent can be: there the
  // difference comes first, which is exactly 0 at the maximum.
  template <class Scores>
  __device__ void exponentiate(Scores& scores) {
    const bool large = find_offsets();
    branch_if(large, [&] {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < cute::size<1>(scores); ++j) scores(i, j) -= finite(max_[i]);
      }
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float offset = large ? 0.f : scale_ * finite(max_[i]);
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(fmaf(scores(i, j), scale_, -offset));
        sum_[i] += scores(i, j);
      }
    }
  }

  // The same by the maximum so far, without looking at that of this tile: no exponential waits for a maximum, and none
  // need be found. Probabilities may exceed 1, which changes nothing in floating point, but not by so much that they
  // leave 16 bits. False where they do, nothing was seen so far, the difference has to come first, or there is a NaN:
  // then the scores are lost, and take raise() and exponentiate(). everywhere(holds) tells those who compute them
  // together whether it holds for all of them. of_row[i]: what scores of row i still lack; or nullptr.
  template <class Element, class Scores, class OfRow, class Vote>
  __device__ bool try_exponentiate(Scores& scores, const OfRow& of_row, Vote&& everywhere) {
    float sum[kRows];
    bool holds = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sum[i] = 0.f;
      float offset = -offset_[i];
      if constexpr (!std::is_null_pointer_v<OfRow>) offset = scale_ * (of_row[i] - max_[i]);
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(scores); ++j) {
        scores(i, j) = exp2_approx(fmaf(scores(i, j), scale_, offset));
        sum[i] += scores(i, j);
      }
      holds &= sum[i] <= kMostTried<Element>;
    }
    if (!everywhere(holds)) return false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) sum_[i] += sum[i];
    return true;
  }

  // Whether there is a maximum for a try: not in rows that have seen nothing, or need the difference first.
  __device__ bool can_try() const {
    bool can = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) can &= offset_[i] > -INFINITY;
    return can;
  }

  // Call once, after the last tile. Rows that saw nothing have sum 0 and lse −inf.
  __device__ void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) sum_[i] = quad_sum(sum_[i]);
  }
  __device__ float max(int i) const { return max_[i]; }
  __device__ float sum(int i) const { return sum_[i]; }
  __device__ float inverse_sum(int i) const { return sum_[i] == 0.f ? 0.f : reciprocal(sum_[i]); }
  // A sink joins a row that is finished. Returns what its output is multiplied by; max(i) is its log-sum-exp then.
  __device__ float join_sink(int i, float unit, float sink) {
    const RowEnd end = end_with_sink(max_[i], sum_[i], unit, sink);
    max_[i] = end.lse;
    return end.factor;
  }
  __device__ RowEnd end(int i, float unit, const float* sink) const { return end_of_row(max_[i], sum_[i], unit, sink); }

 private:
  __device__ void restart_for_try(const float (&reference)[kRows]) {
    restart(reference);
    find_offsets();
  }
  // Whether the difference from the maximum has to come first, in some row of the warp.
  __device__ bool find_offsets() {
    bool large = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) large |= fabsf(scale_ * finite(max_[i])) > kMaxRounded;
    large = __any_sync(0xffffffffu, large) != 0;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      offset_[i] = large || max_[i] == -INFINITY ? -INFINITY : scale_ * max_[i];
    }
    return large;
  }
  static __device__ float finite(float m) { return m == -INFINITY ? 0.f : m; }

  float scale_;
  float max_[kRows], sum_[kRows];
  float offset_[kRows];  // of the exponents by this maximum; −inf, which no try outlives, where there is none to try
};

}  // namespace flashsdk::cuda
