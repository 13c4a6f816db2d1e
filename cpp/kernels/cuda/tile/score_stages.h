// What changes a tile of scores ahead of the mask, in the order of docs/semantics.md, "Scores".
#pragma once

#include "common/mask_policy.h"
#include "cuda/tile/score_features.h"

namespace flashsdk::cuda {

// A mask policy's own change of scores (common/mask_policy.h), or nothing. Elements behind the ends of a sequence are
// asked as the last ones are: a policy need not know them, and the sequence's cut hides them later.
template <class Policy, bool = kHasScore<Policy>>
class PolicyScore {
 public:
  __device__ PolicyScore(const MaskParam& mask, const SeqlenInfo& seq, int batch, int head)
      : policy_(mask, seq, batch, head), last_query_(seq.seqlen_q - 1), last_key_(seq.seqlen_k - 1) {}

  template <class Scores, class At>
  __device__ void apply(Scores& scores, const At& at) const {
    for_each_element(scores, [&](int r, int c, float& s) { s = score_of(policy_, s, query(at, r, c), key(at, r, c)); });
  }
  template <class Scores, class Gradients, class At>
  __device__ void apply(Scores& scores, Gradients& gradients, const At& at) const {
    for_each_element(scores, [&](int r, int c, float& s) {
      const int i = query(at, r, c), j = key(at, r, c);
      if constexpr (kHasScoreSlope<Policy>) gradients(r, c) *= score_slope_of(policy_, s, i, j);
      s = score_of(policy_, s, i, j);
    });
  }

 private:
  template <class At>
  __device__ int query(const At& at, int r, int c) const {
    return max_of(0, min_of(at.query(r, c), last_query_));  // tiles may begin before the first query
  }
  template <class At>
  __device__ int key(const At& at, int r, int c) const {
    return min_of(at.key(r, c), last_key_);
  }

  Policy policy_;
  int last_query_, last_key_;
};
template <class Policy>
class PolicyScore<Policy, false> {
 public:
  __device__ PolicyScore(const MaskParam&, const SeqlenInfo&, int, int) {}
};

// Products become scores in natural-logarithm units, in kernels with softcap compiled in. What is compiled in alone,
// ALiBi or a bias, has a shorter way: AlibiAlone, BiasTile.
template <Features kFeatures, class Policy>
class ScoreStages {
 public:
  __device__ ScoreStages(const ForwardParams& p, const SeqlenInfo& seq, int batch, int head)
      : features_(p.score, seq, batch, head), own_(p.mask, seq, batch, head) {}

  // places(): the elements' TileCoordinates. Only stages that ask for them have them computed.
  template <class Scores, class Places, class BiasTile>
  __device__ void apply(Scores& scores, const Places& places, const BiasTile& bias) const {
    features_.cap(scores);
    if constexpr (has_bias(kFeatures)) features_.shift(scores, places(), bias);
    if constexpr (kHasScore<Policy>) own_.apply(scores, places());
  }
  // The same, and gradients (with respect to the scores that come out) times the derivative.
  template <class Scores, class Gradients, class Places, class BiasTile>
  __device__ void apply(Scores& scores, Gradients& gradients, const Places& places, const BiasTile& bias) const {
    features_.cap(scores, gradients);
    if constexpr (has_bias(kFeatures)) features_.shift(scores, places(), bias);
    if constexpr (kHasScore<Policy>) own_.apply(scores, gradients, places());
  }

 private:
  ScoreFeatures features_;
  PolicyScore<Policy> own_;
};

}  // namespace flashsdk::cuda
