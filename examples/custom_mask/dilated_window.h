// A mask policy of our own: a dilated sliding window. Query i sees the `window` keys i, i - dilation, i - 2·dilation …
// This file is all the kernels need to know of it, forward and backward (flashsdk/kernels/common/mask_policy.h).
#pragma once

#include <flashsdk/kernels/common/mask_policy.h>

// Run-time parameters; reached through MaskParam::user.
struct DilatedWindow {
  int window, dilation;
};

class DilatedWindowPolicy {
 public:
  static constexpr flashsdk::MaskKind kKind = flashsdk::MaskKind::kBand;  // tiles cost unequal amounts

  FLASHSDK_HD DilatedWindowPolicy(const flashsdk::MaskParam& mask, const flashsdk::SeqlenInfo& s, int /*batch*/,
                                  int /*head*/)
      : mask_(*static_cast<const DilatedWindow*>(mask.user)), seqlen_q_(s.seqlen_q), seqlen_k_(s.seqlen_k) {}

  // Queries [i0, i1) see nothing outside keys (i0 - reach, i1).
  FLASHSDK_HD flashsdk::TileWalk row_walk(flashsdk::Tile tile, int m_block) const {
    int i0 = m_block * tile.m, i1 = flashsdk::min_of(i0 + tile.m, seqlen_q_);
    return partial_tiles(i0 - reach() + 1, i1, tile.n, seqlen_k_);
  }
  // Keys [j0, j1) are seen by nobody outside queries [j0, j1 + reach - 1).
  FLASHSDK_HD flashsdk::TileWalk col_walk(flashsdk::Tile tile, int n_block) const {
    int j0 = n_block * tile.n, j1 = flashsdk::min_of(j0 + tile.n, seqlen_k_);
    return partial_tiles(j0, j1 + reach() - 1, tile.m, seqlen_q_);
  }
  FLASHSDK_HD bool allowed(int i, int j) const { return j <= i && i - j < reach() && (i - j) % mask_.dilation == 0; }

 private:
  FLASHSDK_HD int reach() const { return mask_.window * mask_.dilation; }
  static FLASHSDK_HD flashsdk::TileWalk partial_tiles(int begin, int end, int size, int seqlen) {
    begin = flashsdk::max_of(begin, 0);
    end = flashsdk::min_of(end, seqlen);
    if (begin >= end) return flashsdk::TileWalk::runs(0, 0, 0, 0);
    int last = flashsdk::ceil_div(end, size);
    return flashsdk::TileWalk::runs(begin / size, last, last, last);  // no tile is seen throughout
  }

  DilatedWindow mask_;
  int seqlen_q_, seqlen_k_;
};
