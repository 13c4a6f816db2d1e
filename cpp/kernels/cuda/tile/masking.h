// Cuts a tile of scores to what the mask policy allows and to the sequence ends.
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

#include "common/mask_policy.h"
#include "cuda/tile/math.h"

namespace flashsdk::cuda {

// What one query sees of a tile: an interval where the policy knows it, else asked key by key.
template <class Policy>
class VisibleKeys {
 public:
  __device__ VisibleKeys(const Policy& policy, bool partial, int query, int seqlen_k)
      : policy_(policy), ask_(partial), query_(query), range_{0, seqlen_k} {
    if constexpr (kHasKeyRange<Policy>) {
      if (partial) {
        KeyRange seen = policy.keys_of(query);
        range_ = {max_of(range_.begin, seen.begin), min_of(range_.end, seen.end)};
      }
    }
  }
  __device__ bool contains(int key) const {
    bool inside = key >= range_.begin && key < range_.end;
    if constexpr (!kHasKeyRange<Policy>) inside = inside && (!ask_ || policy_.allowed(query_, key));
    return inside;
  }

 private:
  const Policy& policy_;
  bool ask_;
  int query_;
  KeyRange range_;
};

// Rows are keys. Every element differs from the first by constants, which comparisons take as immediate operands.
template <class Scores, class Coordinates>
__device__ void mask_diagonals(Scores& scores, const Coordinates& coordinates, KeyRange diagonals, int m0, int n0,
                               int seqlen_k, float masked_value) {
  const auto origin = coordinates(0, 0);
  const int first = n0 + cute::get<0>(origin) - m0 - cute::get<1>(origin);  // key - query of the first element
  const int behind_begin = first - diagonals.begin, before_end = diagonals.end - first;
  const int keys = seqlen_k - n0 - cute::get<0>(origin);
  CUTE_UNROLL
  for (int q = 0; q < kExtent<Scores, 1>; ++q) {
    const int query = cute::get<1>(coordinates(0, q)) - cute::get<1>(origin);
    CUTE_UNROLL
    for (int k = 0; k < kExtent<Scores, 0>; ++k) {
      const int key = cute::get<0>(coordinates(k, 0)) - cute::get<0>(origin), diagonal = key - query;
      if (behind_begin < -diagonal || before_end <= diagonal || key >= keys) scores(k, q) = masked_value;
    }
  }
}

// Rows are queries, each of which sees an interval of keys. Columns differ from a thread's first by constants too.
template <class Policy, class Scores, class Coordinates>
__device__ void mask_ranges(Scores& scores, const Coordinates& coordinates, const Policy& policy, bool partial, int m0,
                            int n0, int seqlen_k, float masked_value) {
  const auto origin = coordinates(0, 0);
  const int first = n0 + cute::get<1>(origin);
  CUTE_UNROLL
  for (int q = 0; q < kExtent<Scores, 0>; ++q) {
    KeyRange seen{0, seqlen_k};
    if (partial) {
      seen = policy.keys_of(m0 + cute::get<0>(coordinates(q, 0)));
      seen.end = min_of(seen.end, seqlen_k);
    }
    const int begin = seen.begin - first, end = seen.end - first;
    CUTE_UNROLL
    for (int k = 0; k < kExtent<Scores, 1>; ++k) {
      const int key = cute::get<1>(coordinates(0, k)) - cute::get<1>(origin);
      if (begin > key || end <= key) scores(q, k) = masked_value;
    }
  }
}

// Which keys of a tile the rows of a thread see, as a bit for each of its columns: known before the scores are.
template <int kRows, int kColumns>
class VisibleColumns {
 public:
  // Columns of an accumulator come in pairs, eight keys apart. begin, end: keys counted from the thread's first.
  __device__ void set(int row, int begin, int end) {
    CUTE_UNROLL
    for (int i = 0; i < kWords; ++i) bits_[row][i] = first(before(end) - 32 * i) & ~first(before(begin) - 32 * i);
  }
  // The same, key by key.
  __device__ void clear() {
    CUTE_UNROLL
    for (int i = 0; i < kRows * kWords; ++i) bits_[i / kWords][i % kWords] = 0;
  }
  __device__ void show(int row, int column) { bits_[row][column / 32] |= 1u << column % 32; }
  // Hidden ones become −inf. zero: of the branch, see branch_if(). A sum is taken for new by the compiler, which then
  // tests seven of its bits in one instruction.
  template <class Scores>
  __device__ void hide_others(Scores& scores, unsigned zero) const {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kExtent<Scores, 1>; ++j) {
        scores(i, j) = ((bits_[i][j / 32] + zero) & (1u << j % 32)) != 0 ? scores(i, j) : -INFINITY;
      }
    }
  }

 private:
  static constexpr int kWords = (kColumns + 31) / 32;
  static __device__ int before(int key) {
    const int k = max_of(key, 0);
    return k / 8 * 2 + min_of(k % 8, 2);
  }
  static __device__ std::uint32_t first(int count) { return count >= 32 ? ~0u : (1u << max_of(count, 0)) - 1; }

  std::uint32_t bits_[kRows][kWords];
};

// Rows are queries, each of which sees an interval of keys, keys_of(query): see mask_tile().
template <class KeysOf, class Coordinates, int kRows, int kColumns>
__device__ void find_visible(VisibleColumns<kRows, kColumns>& visible, const Coordinates& coordinates,
                             const KeysOf& keys_of, bool partial, int m0, int n0, int seqlen_k) {
  const int first = n0 + cute::get<1>(coordinates(0, 0));
  CUTE_UNROLL
  for (int q = 0; q < kRows; ++q) {
    KeyRange seen{0, seqlen_k};
    if (partial) {
      seen = keys_of(m0 + cute::get<0>(coordinates(q, 0)));
      seen.end = min_of(seen.end, seqlen_k);
    }
    visible.set(q, seen.begin - first, seen.end - first);
  }
}

// The same where the policy knows no intervals.
template <class Policy, class Coordinates, int kRows, int kColumns>
__device__ void ask_visible(VisibleColumns<kRows, kColumns>& visible, const Coordinates& coordinates,
                            const Policy& policy, bool partial, int m0, int n0, int seqlen_k) {
  visible.clear();
  CUTE_UNROLL
  for (int q = 0; q < kRows; ++q) {
    const VisibleKeys<Policy> seen(policy, partial, m0 + cute::get<0>(coordinates(q, 0)), seqlen_k);
    CUTE_UNROLL
    for (int k = 0; k < kColumns; ++k)
      if (seen.contains(n0 + cute::get<1>(coordinates(0, k)))) visible.show(q, k);
  }
}

// scores is a matrix view of an accumulator, coordinates its (row, column) inside the tile; rows are queries, or keys
// when kTransposed. m0 and n0 are the tile's first query and key.
template <bool kTransposed, class Policy, class Scores, class Coordinates>
__device__ void mask_tile(Scores& scores, const Coordinates& coordinates, const Policy& policy, bool partial, int m0,
                          int n0, int seqlen_k, float masked_value) {
  if constexpr (kTransposed && kHasDiagonals<Policy>) {
    const KeyRange all{-(1 << 30), 1 << 30};
    mask_diagonals(scores, coordinates, partial ? policy.diagonals() : all, m0, n0, seqlen_k, masked_value);
    return;
  }
  if constexpr (!kTransposed && kHasKeyRange<Policy>) {
    mask_ranges(scores, coordinates, policy, partial, m0, n0, seqlen_k, masked_value);
    return;
  }
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
