// Cuts a tile of scores to what the mask policy allows and to the sequence ends.
#pragma once

#include <type_traits>
#include <utility>

#include <cute/tensor.hpp>

#include "common/mask_policy.h"
#include "cuda/math.h"

namespace flashsdk::cuda {

template <class Policy, class = void>
struct HasKeyRange : std::false_type {};
template <class Policy>
struct HasKeyRange<Policy, std::void_t<decltype(std::declval<const Policy&>().keys_of(0))>> : std::true_type {};

// What one query sees of a tile: an interval where the policy knows it, else asked key by key.
template <class Policy>
class VisibleKeys {
 public:
  __device__ VisibleKeys(const Policy& policy, bool partial, int query, int seqlen_k)
      : policy_(policy), ask_(partial), query_(query), range_{0, seqlen_k} {
    if constexpr (HasKeyRange<Policy>::value) {
      if (partial) {
        KeyRange seen = policy.keys_of(query);
        range_ = {max_of(range_.begin, seen.begin), min_of(range_.end, seen.end)};
      }
    }
  }
  __device__ bool contains(int key) const {
    bool inside = key >= range_.begin && key < range_.end;
    if constexpr (!HasKeyRange<Policy>::value) inside = inside && (!ask_ || policy_.allowed(query_, key));
    return inside;
  }

 private:
  const Policy& policy_;
  bool ask_;
  int query_;
  KeyRange range_;
};

// scores is a matrix view of an accumulator, coordinates its (row, column) inside the tile; rows are queries, or keys
// when kTransposed. m0 and n0 are the tile's first query and key.
template <bool kTransposed, class Policy, class Scores, class Coordinates>
__device__ void mask_tile(Scores& scores, const Coordinates& coordinates, const Policy& policy, bool partial, int m0,
                          int n0, int seqlen_k, float masked_value) {
  constexpr int kQueries = kExtent < Scores, kTransposed ? 1 : 0 >, kKeys = kExtent < Scores, kTransposed ? 0 : 1 > ;
  CUTE_UNROLL
  for (int q = 0; q < kQueries; ++q) {
    int query = m0 + (kTransposed ? cute::get<1>(coordinates(0, q)) : cute::get<0>(coordinates(q, 0)));
    VisibleKeys<Policy> visible(policy, partial, query, seqlen_k);
    CUTE_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      int key = n0 + (kTransposed ? cute::get<0>(coordinates(k, 0)) : cute::get<1>(coordinates(0, k)));
      float& s = kTransposed ? scores(k, q) : scores(q, k);
      if (!visible.contains(key)) s = masked_value;
    }
  }
}

}  // namespace flashsdk::cuda
