// Mask policies: the sparsity layout as a small type that every kernel, on every backend, asks the same questions.
//
// A policy is built per (batch, head) and has
//   static constexpr MaskKind kKind    what MaskParam::kind is; a user's own has kBand: tiles cost unequal amounts,
//   TileWalk row_walk(Tile, m_block)   the key tiles a tile of queries visits,
//   TileWalk col_walk(Tile, n_block)   the transpose: the query tiles a tile of keys is visited by,
//   bool allowed(i, j)                 whether query i sees key j; asked in partial tiles only,
// and, where the visible keys of a query are one interval, also
//   KeyRange keys_of(i)                that interval, which lets kernels trim and mask by two comparisons.
// A policy that is the same along every diagonal may offer
//   KeyRange diagonals()               the visible values of j - i in partial tiles,
// and a GPU kernel then compares each element with two constants.
// A policy may also change scores, as the last of what docs/semantics.md, "Scores", has ahead of the mask:
//   float score(float s, i, j)         the score of query i and key j, from the one scaled, capped and biased,
//   float score_slope(float s, i, j)   its derivative d score / d s; 1 where the policy has none.
// Kernels with all features compiled in (Features::kAll, on sm90 kCapped) ask for it, in every tile that they visit. A
// key that a bias hides stays hidden.
//
// i and j are local to the sequence. Cutting at the sequence ends belongs to the kernel. A policy of a user's own runs
// in all kernels: examples/custom_mask and examples/custom_score have one each.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>

#include "common/params.h"
#include "common/seqlen_info.h"
#include "common/tile_walk.h"

namespace flashsdk {

struct KeyRange {
  int begin, end;
};

// Which of what a policy may offer it does.
template <class Policy, class = void>
inline constexpr bool kHasKeyRange = false;
template <class Policy>
inline constexpr bool kHasKeyRange<Policy, std::void_t<decltype(std::declval<const Policy&>().keys_of(0))>> = true;

template <class Policy, class = void>
inline constexpr bool kHasDiagonals = false;
template <class Policy>
inline constexpr bool kHasDiagonals<Policy, std::void_t<decltype(std::declval<const Policy&>().diagonals())>> = true;

template <class Policy, class = void>
inline constexpr bool kHasScore = false;
template <class Policy>
inline constexpr bool kHasScore<Policy, std::void_t<decltype(std::declval<const Policy&>().score(0.f, 0, 0))>> = true;

template <class Policy, class = void>
inline constexpr bool kHasScoreSlope = false;
template <class Policy>
inline constexpr bool
    kHasScoreSlope<Policy, std::void_t<decltype(std::declval<const Policy&>().score_slope(0.f, 0, 0))>> = true;

// A policy's score and its slope, from a score that may be hidden already.
template <class Policy>
FLASHSDK_HD float score_of(const Policy& policy, float s, int i, int j) {
  return s == -INFINITY ? s : policy.score(s, i, j);
}
template <class Policy>
FLASHSDK_HD float score_slope_of(const Policy& policy, float s, int i, int j) {
  if constexpr (kHasScoreSlope<Policy>) return policy.score_slope(s, i, j);
  return 1.f;
}

// Of a band's walk along the keys of a tile of queries, the last tile whose first key all of these see, or one beyond
// the walk where that is its last; where there is none, TileWalk::full_begin(). OutwardWalk takes it as its origin.
FLASHSDK_HD int last_tile_begun_by_all(const TileWalk& walk, KeyRange diagonals, int first_query, int tile_keys) {
  const int begun_by_first = (max_of(first_query, 0) + diagonals.end - 1) / tile_keys;
  return max_of(walk.full_begin(), begun_by_first);
}

FLASHSDK_HD constexpr int clamp_index(std::int64_t x, int limit) {
  return x < 0 ? 0 : (x > limit ? limit : static_cast<int>(x));
}

class DensePolicy {
 public:
  static constexpr MaskKind kKind = MaskKind::kDense;

  FLASHSDK_HD DensePolicy(const MaskParam&, const SeqlenInfo& s, int /*batch*/, int /*head*/)
      : seqlen_q_(s.seqlen_q), seqlen_k_(s.seqlen_k) {}

  FLASHSDK_HD TileWalk row_walk(Tile tile, int) const {
    int n = ceil_div(seqlen_k_, tile.n);
    return TileWalk::runs(0, 0, n, n);
  }
  FLASHSDK_HD TileWalk col_walk(Tile tile, int) const {
    int m = ceil_div(seqlen_q_, tile.m);
    return TileWalk::runs(0, 0, m, m);
  }
  FLASHSDK_HD bool allowed(int, int) const { return true; }
  FLASHSDK_HD KeyRange keys_of(int) const { return {0, seqlen_k_}; }

 private:
  int seqlen_q_, seqlen_k_;
};

// -left <= j - (i + shift) <= right.
class BandPolicy {
 public:
  static constexpr MaskKind kKind = MaskKind::kBand;

  FLASHSDK_HD BandPolicy(const MaskParam& mask, const SeqlenInfo& s, int /*batch*/, int /*head*/)
      : seqlen_q_(s.seqlen_q), seqlen_k_(s.seqlen_k) {
    std::int64_t shift = mask.band.top_left ? 0 : std::int64_t{s.seqlen_k} - s.seqlen_q;
    first_ = shift - mask.band.left;
    last_ = shift + mask.band.right;
    if (first_ > last_) {  // hides everything: say so once, so that no walk visits a tile
      first_ = BandParam::kUnlimited;
      last_ = -BandParam::kUnlimited;
    }
  }

  FLASHSDK_HD TileWalk row_walk(Tile tile, int m_block) const { return row_walk_from(tile, m_block * tile.m); }
  // Of tile.m queries from any one on, or from before the first of all.
  FLASHSDK_HD TileWalk row_walk_from(Tile tile, int first) const {
    const int i0 = max_of(first, 0), i1 = min_of(first + tile.m, seqlen_q_) - 1;
    // A tile is visited when any of its queries sees one of its keys, full when all of them see all.
    return walk(i0 + first_, i1 + last_, i1 + first_, i0 + last_, tile.n, seqlen_k_);
  }
  FLASHSDK_HD TileWalk col_walk(Tile tile, int n_block) const {
    int j0 = n_block * tile.n, j1 = min_of(j0 + tile.n, seqlen_k_) - 1;
    // Key j is seen by the queries j - last_ … j - first_.
    return walk(j0 - last_, j1 - first_, j1 - last_, j0 - first_, tile.m, seqlen_q_);
  }
  FLASHSDK_HD bool allowed(int i, int j) const { return j >= i + first_ && j <= i + last_; }
  FLASHSDK_HD KeyRange diagonals() const {
    constexpr int kFar = 1 << 30;  // beyond any sequence that fits a device
    return {clamp_index(first_ + kFar, 2 * (kFar - 1)) - kFar, clamp_index(last_ + 1 + kFar, 2 * (kFar - 1)) - kFar};
  }
  FLASHSDK_HD KeyRange keys_of(int i) const {
    return {clamp_index(i + first_, seqlen_k_), clamp_index(i + last_ + 1, seqlen_k_)};
  }

 private:
  // [any_begin, any_last] is what some line of the tile sees, [all_begin, all_last] what every line sees.
  static FLASHSDK_HD TileWalk walk(std::int64_t any_begin, std::int64_t any_last, std::int64_t all_begin,
                                   std::int64_t all_last, int size, int seqlen) {
    int any0 = clamp_index(any_begin, seqlen), any1 = clamp_index(any_last + 1, seqlen);
    int all0 = clamp_index(all_begin, seqlen), all1 = clamp_index(all_last + 1, seqlen);
    if (any0 >= any1) return TileWalk::runs(0, 0, 0, 0);
    int begin = any0 / size, end = ceil_div(any1, size);
    int full_begin = ceil_div(all0, size);
    int full_end = all1 == seqlen ? ceil_div(all1, size) : all1 / size;  // the last tile is cut by the sequence end
    full_begin = max_of(begin, min_of(full_begin, end));
    full_end = max_of(full_begin, min_of(full_end, end));
    return TileWalk::runs(begin, full_begin, full_end, end);
  }

  int seqlen_q_, seqlen_k_;
  std::int64_t first_, last_;  // query i sees keys i + first_ … i + last_
};

// Visits the blocks a layout lists. Kernel tiles divide layout blocks, so a tile lies in one of them.
class BlockSparsePolicy {
 public:
  static constexpr MaskKind kKind = MaskKind::kBlockSparse;

  FLASHSDK_HD BlockSparsePolicy(const MaskParam& mask, const SeqlenInfo& s, int batch, int head)
      : mask_(mask),
        band_(mask, s, batch, head),
        batch_(batch),
        head_(head),
        seqlen_q_(s.seqlen_q),
        seqlen_k_(s.seqlen_k) {}

  FLASHSDK_HD TileWalk row_walk(Tile tile, int m_block) const {
    int line = m_block * tile.m / mask_.block_q;
    return walk(mask_.row_partial, mask_.row_full, line, mask_.block_k / tile.n, ceil_div(seqlen_k_, tile.n));
  }
  FLASHSDK_HD TileWalk col_walk(Tile tile, int n_block) const {
    int line = n_block * tile.n / mask_.block_k;
    return walk(mask_.col_partial, mask_.col_full, line, mask_.block_q / tile.m, ceil_div(seqlen_q_, tile.m));
  }
  FLASHSDK_HD bool allowed(int i, int j) const { return band_.allowed(i, j); }
  FLASHSDK_HD KeyRange keys_of(int i) const { return band_.keys_of(i); }  // within partial blocks
  FLASHSDK_HD KeyRange diagonals() const { return band_.diagonals(); }    // likewise

 private:
  FLASHSDK_HD TileWalk walk(const BlockListParam& partial, const BlockListParam& full, int line, int split,
                            int end) const {
    const std::int32_t* p = partial.offsets + batch_ * partial.batch + head_ * partial.head + line;
    const std::int32_t* f = full.offsets + batch_ * full.batch + head_ * full.head + line;
    return TileWalk::lists(partial.indices + p[0], p[1] - p[0], full.indices + f[0], f[1] - f[0], split, end);
  }

  const MaskParam& mask_;
  BandPolicy band_;
  int batch_, head_;
  int seqlen_q_, seqlen_k_;
};

}  // namespace flashsdk
