// Softcap, bias and ALiBi on a tile of scores, and the derivative of softcap. Compiled into featured kernels only.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>
#include <cute/tensor.hpp>

#include "common/features.h"
#include "common/score_mod.h"
#include "common/seqlen_info.h"
#include "cuda/tile/math.h"

namespace flashsdk::cuda {

// Whether nothing else changes scores: a bias is then added as they are scaled.
constexpr bool has_bias_alone(Features f) { return has_bias(f) && !has_softcap(f) && !has_alibi(f); }
// Whether scores are multiplied by the softmax scale, and more. ALiBi alone is added to the products.
constexpr bool modifies_scores(Features f) { return has_softcap(f) || has_bias(f); }

// (query, key) of the elements of a tile's accumulator. They differ by constants from the first one's, which is hidden
// from the compiler: what follows from it would be computed ahead of the loop over tiles, whether a feature asks or
// not, and the registers it takes would be missing there.
template <bool kTransposed, class Coordinates>
class TileCoordinates {
 public:
  // local: (row, column); rows are queries, or keys when kTransposed. m0, n0: first query and key of the tile.
  __device__ TileCoordinates(const Coordinates& local, int m0, int n0)
      : local_(local), query_(opaque(m0 + local_query(0, 0))), key_(opaque(n0 + local_key(0, 0))) {}

  __device__ int query(int i, int j) const { return query_ + (local_query(i, j) - local_query(0, 0)); }
  __device__ int key(int i, int j) const { return key_ + (local_key(i, j) - local_key(0, 0)); }

  // Of the tile.
  __device__ int local_query(int i, int j) const { return cute::get<kTransposed ? 1 : 0>(local_(i, j)); }
  __device__ int local_key(int i, int j) const { return cute::get<kTransposed ? 0 : 1>(local_(i, j)); }

 private:
  Coordinates local_;
  int query_, key_;
};

template <class Matrix, class F>
__device__ void for_each_element(Matrix& matrix, F&& f) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size<0>(matrix); ++i) {
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(matrix); ++j) f(i, j, matrix(i, j));
  }
}

// A score times a scale and its bias. −inf hides the key whatever its score is, NaN too; a finite bias never does: the
// sum stays finite.
__device__ __forceinline__ float biased(float s, float scale, float bias) {
  return bias == -INFINITY ? -INFINITY : max_or_nan(fmaf(s, scale, bias), -FLT_MAX);
}

// ALiBi of one head, in the unit of the scores that it is added to.
class AlibiBias {
 public:
  __device__ AlibiBias(float slope, int shift) : slope_(slope), shift_(shift) {}  // shift: seqlen_k - seqlen_q

  // In float: exact below 2^24. Distances differ from the first one by constants: two instructions an element.
  template <class Scores, class At>
  __device__ void add(Scores& scores, const At& at) const {
    const float first = first_distance(at);
    for_each_element(scores, [&](int i, int j, float& s) {
      const int further = at.local_query(i, j) - at.local_query(0, 0) - (at.local_key(i, j) - at.local_key(0, 0));
      s = fmaf(-slope_, fabsf(first + static_cast<float>(further)), s);
    });
  }

  // The same where rows are queries and all keys of the tile are on one side of their diagonal, before it or not: one
  // instruction an element, as what is the same for a row is not added to its scores, but told.
  template <class Scores, class At, int kRows>
  __device__ void add_on_one_side(Scores& scores, const At& at, bool before, float (&of_row)[kRows]) const {
    const float slope = before ? slope_ : -slope_, first = first_distance(at);
    for_each_element(scores, [&](int i, int j, float& s) {
      s = fmaf(static_cast<float>(at.local_key(i, j) - at.local_key(i, 0)), slope, s);
    });
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i)
      of_row[i] = -slope * (first + static_cast<float>(at.local_query(i, 0) - at.local_query(0, 0)));
  }

  // Of keys from n0 on that are on one side of the diagonal of queries up to m1, whether they are before it.
  __device__ bool before_diagonal(int m1, int n0) const { return m1 + shift_ > n0; }

 private:
  template <class At>
  __device__ float first_distance(const At& at) const {
    return static_cast<float>(at.query(0, 0) + shift_ - at.key(0, 0));
  }

  float slope_;
  int shift_;
};

// Where ALiBi is the only feature, else nothing: in the unit of products, which the exponentials multiply by the
// softmax scale.
template <Features kFeatures>
class AlibiAlone {
 public:
  AlibiAlone() = default;
  __device__ AlibiAlone(const ScoreParam&, const SeqlenInfo&, int, int) {}
};
template <>
class AlibiAlone<Features::kAlibi> : public AlibiBias {
 public:
  // Whether a slope's quotient loses no digits.
  static bool divides_by(float softmax_scale) { return softmax_scale >= 0x1p-40f && softmax_scale <= 0x1p40f; }

  static __device__ float slope(const ScoreParam& score, int batch, int head) {
    return quotient(alibi_slope(score, batch, head), score.softmax_scale);
  }
  __device__ AlibiAlone(float slope, const SeqlenInfo& seq) : AlibiBias(slope, seq.seqlen_k - seq.seqlen_q) {}
  __device__ AlibiAlone(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head)
      : AlibiAlone(slope(score, batch, head), seq) {}
};

// Null, or why kernels with these features do not take a call.
template <Features kFeatures>
const char* refuse_features(const ScoreParam& score) {
  static_assert(kFeatures == Features::kNone || kFeatures == Features::kDropout || kFeatures == Features::kCapped ||
                    kFeatures == Features::kAlibi || kFeatures == Features::kBias ||
                    kFeatures == Features::kBiasDropout || kFeatures == Features::kAll,
                "other sets have no code of their own: what is alone is added in another place than what is not");
  const Features lacks = missing(kFeatures, score.features());
  if (has_softcap(lacks)) return "softcap is not compiled in";
  if (has_dropout(lacks)) return "dropout is not compiled in";
  if (has_bias(lacks)) return "a bias is not compiled in";
  if (has_alibi(lacks)) return "ALiBi is not compiled in";
  if (lacks != Features::kNone) return "a feature is not compiled in";  // one that has no line of its own yet
  if (kFeatures == Features::kAlibi && !AlibiAlone<Features::kAlibi>::divides_by(score.softmax_scale))
    return "ALiBi's slopes would be divided by a softmax_scale that is not between 2^-40 and 2^40";
  return nullptr;
}

// In kernels that keep no tile of the bias in shared memory, as bias_tile.h does.
class NoBiasTile {
 public:
  static constexpr int kBytes = 0;
  static bool takes(const BiasParam&) { return false; }

  template <class... Args>
  __device__ explicit NoBiasTile(const Args&...) {}
  static __device__ bool holds() { return false; }
  static __device__ void load(int, int) {}
  template <class Scores, class At>
  static __device__ void add(Scores&, const At&, float) {}
};

// The features of one head, which score_stages.h applies in their order.
class ScoreFeatures {
 public:
  __device__ ScoreFeatures(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head)
      : score_(score),
        slope_(alibi_slope(score, batch, head)),
        seqlen_q_(seq.seqlen_q),
        seqlen_k_(seq.seqlen_k),
        bias_offset_(batch * score.bias.batch + head * score.bias.head) {}

  // Whether scores are more than the product times the softmax scale.
  static FLASHSDK_HD bool any(const ScoreParam& score) {
    return score.softcap > 0.f || score.bias.ptr != nullptr || score.alibi_slopes != nullptr;
  }

  // Scale and softcap.
  template <class Scores>
  __device__ void cap(Scores& scores) const {
    softcap(scores, [](int, int, float) {});
  }
  // The same, and gradients (with respect to the capped scores) times d softcap(s) / ds.
  template <class Scores, class Gradients>
  __device__ void cap(Scores& scores, Gradients& gradients) const {
    softcap(scores, [&](int i, int j, float tanh) { gradients(i, j) *= 1.f - tanh * tanh; });
  }

  // A bias, from a tile in shared memory where that has one, and ALiBi.
  template <bool kTransposed, class Scores, class Coordinates, class BiasTile>
  __device__ void shift(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at,
                        const BiasTile& bias) const {
    branch_if(bias.holds(), [&] { bias.add(scores, at, 1.f); });
    branch_if(score_.bias.ptr != nullptr && !bias.holds(), [&] { add_bias(scores, at, 1.f); });
    branch_if(slope_ != 0.f, [&] { AlibiBias(slope_, seqlen_k_ - seqlen_q_).add(scores, at); });
  }

  // A bias alone, element by element, to scores times a scale.
  template <bool kTransposed, class Scores, class Coordinates>
  __device__ void add_bias(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at, float scale) const {
    switch (score_.bias.dtype) {
      case DType::kFloat32:
        return add_elements<float>(scores, at, scale);
      case DType::kBool:
        return add_elements<bool>(scores, at, scale);
      default:
        return add_elements<std::uint16_t>(scores, at, scale);
    }
  }

 private:
  template <class Scores, class OnTanh>
  __device__ void softcap(Scores& scores, OnTanh&& on_tanh) const {
    for_each_element(scores, [&](int, int, float& s) { s *= score_.softmax_scale; });
    branch_if(score_.softcap > 0.f, [&] {
      // Below the normal numbers the reciprocal may be infinite; there tanh is ±1 and the score next to 0 anyway.
      const float softcap = fmaxf(score_.softcap, FLT_MIN), inverse = reciprocal(softcap);
      for_each_element(scores, [&](int i, int j, float& s) {
        const float tanh = tanh_accurate(s * inverse);
        on_tanh(i, j, tanh);
        s = softcap * tanh;
      });
    });
  }

  // 16 bits are either of the two types: one loop for both keeps the code small. A piece's values are all asked for
  // before the first is needed. All of a tile's would take as many registers as its scores, and the loop over tiles
  // would lack them whether there is a bias or not: each piece is a branch of its own.
  template <class T, bool kTransposed, class Scores, class Coordinates>
  __device__ void add_elements(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at, float scale) const {
    constexpr bool kBool = std::is_same_v<T, bool>;
    constexpr int kAtOnce = kTransposed ? 8 : 16;
    constexpr int kRows = kExtent<Scores, 0>, kColumns = min_of(max_of(1, kAtOnce / kRows), kExtent<Scores, 1>);
    static_assert(kExtent<Scores, 1> % kColumns == 0);
    const std::int64_t row_stride = opaque(score_.bias.row), column_stride = opaque(score_.bias.col);
    const T* bias = static_cast<const T*>(score_.bias.ptr) + bias_offset_ + at.query(0, 0) * row_stride +
                    at.key(0, 0) * column_stride;
    const bool half = score_.bias.dtype == DType::kFloat16;
    CUTE_UNROLL
    for (int first = 0; first < kExtent<Scores, 1>; first += kColumns) {
      branch_if(score_.bias.ptr != nullptr, [&] {
        T value[kRows][kColumns];
        for_each_of<kRows, kColumns>([&](int i, int c) {
          const int query = at.query(i, first + c), key = at.key(i, first + c);
          const T* from = bias + (query - at.query(0, 0)) * row_stride + (key - at.key(0, 0)) * column_stride;
          value[i][c] = query < seqlen_q_ && key < seqlen_k_ ? *from : T(kBool);
        });
        for_each_of<kRows, kColumns>([&](int i, int c) {
          float& s = scores(i, first + c);
          if constexpr (kBool) {
            s = value[i][c] ? s * scale : -INFINITY;
          } else if constexpr (std::is_same_v<T, float>) {
            s = biased(s, scale, value[i][c]);
          } else {
            s = biased(s, scale,
                       half ? __half2float(__ushort_as_half(value[i][c]))
                            : __uint_as_float(static_cast<std::uint32_t>(value[i][c]) << 16));
          }
        });
      });
    }
  }
  template <int kRows, int kColumns, class F>
  static __device__ void for_each_of(F&& f) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kColumns; ++j) f(i, j);
    }
  }

  const ScoreParam& score_;
  float slope_;
  int seqlen_q_, seqlen_k_;
  std::int64_t bias_offset_;
};

}  // namespace flashsdk::cuda
