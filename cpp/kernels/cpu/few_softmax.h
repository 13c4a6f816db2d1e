// The online softmax of a few queries of one head, whose S and P are rows of keys: keys are in vector lanes.
#pragma once

#include "cpu/row_list.h"
#include "cpu/scores.h"
#include "cpu/traits.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// All lanes in one value.
template <class F>
FLASHSDK_HD float fold_lanes(Vec x, F fold) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] = fold(lane[i], lane[i + n]);
  return lane[0];
}

// Of up to kMost_ queries.
template <class T, int kHeadDim, int kMost_>
class FewSoftmax {
 protected:
  using Tr = Traits<T, kHeadDim>;
  static constexpr int kBlock = 2 * kLanes, kKeys = round_up(Tr::kKeys, kBlock);

 public:
  static constexpr int kMost = kMost_;
  using Rows = RowList<kKeys, kBlock>;
  static constexpr int kScoreFloats = kMost * kKeys;

  // Of a query, a row of keys.
  float* row(int query) { return s_ + query * kKeys; }

  // The online softmax's step: P in place of S, and O = O·exp(m - m').
  __attribute__((noinline)) void exponentiate() {
    for (int l = 0; l < queries_; ++l) {
      for (int r = keys_; r < round_up(keys_, kLanes); ++r) row(l)[r] = -INFINITY;
      raise_softmax(l);
    }
  }

  float* out(int query) { return out_ + query * kHeadDim; }  // not normalised
  float max(int query) const { return max_[query]; }
  float sum(int query) const { return sum_[query]; }

 protected:
  // In s are S (queries, keys) and then P, between the products.
  explicit FewSoftmax(float* s) : s_(s) {}

  // `factor` takes a score to units of log2.
  void begin(int queries, int d, int d_v, float factor) {
    queries_ = queries;
    d_ = d;
    d_v_ = d_v;
    factor_ = factor;
    for (int l = 0; l < queries; ++l) {
      std::memset(out(l), 0, sizeof(float) * kHeadDim);
      max_[l] = -INFINITY;
      sum_[l] = 0.f;
    }
  }

  int queries_ = 0, d_ = 0, d_v_ = 0, keys_ = 0;
  RowsAhead ahead_;
  float* s_;
  alignas(64) float out_[kMost * kHeadDim];

 private:
  void raise_softmax(int l) {
    float* s = row(l);
    const int end = round_up(keys_, kLanes);
    Vec top = load(s);
    for (int r = kLanes; r < end; r += kLanes) top = FLASHSDK_ISA_NS::max(top, load(s + r));
    const float old_max = max_[l], new_max = fold_lanes(top, [](float a, float b) { return a > b ? a : b; });
    if (new_max > old_max) max_[l] = new_max;
    // A row that has seen no key yet takes m' = 0 instead of -inf.
    const Vec shift = finite_or_zero(set1(max_[l])), factor = set1(factor_);
    Vec sum = zero();
    for (int r = 0; r < end; r += kLanes) {
      const Vec p = exp2<Tr::kExpDegree>(mul(sub(load(s + r), shift), factor));
      sum = add(sum, p);
      store(s + r, p);
    }
    const Vec rescale = exp2<5>(mul(sub(set1(old_max), shift), factor));
    alignas(64) float scale[kLanes];
    store(scale, rescale);
    sum_[l] = sum_[l] * scale[0] + fold_lanes(sum, [](float a, float b) { return a + b; });
    for (int c = 0; c < d_v_; c += kLanes) {
      float* out = out_ + l * kHeadDim + c;
      store(out, mul(load(out), rescale));
    }
  }

  float factor_ = 0.f;
  float max_[kMost], sum_[kMost];
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
