// Which of the forward's tiles a problem gets: the one place that decides it. The measurements are in
// docs/sm90-forward.md.
#pragma once

#include <algorithm>

#include "common/params.h"
#include "common/tile_walk.h"

namespace flashsdk::sm90 {

// Keys that a tile of queries may see.
inline std::int64_t most_keys(const ForwardParams& p) {
  constexpr int kQueries = 128;
  const std::int64_t keys = p.seqlen_k;
  return p.mask.kind == MaskKind::kBand ? std::min(keys, p.mask.band.left + p.mask.band.right + kQueries) : keys;
}

// Layouts need tiles that divide their blocks, and dropout a number of keys that is a multiple of 32. Long tiles waste
// rows and keys, and leave multiprocessors idle, where sequences are short or cut by a band.
inline Tile forward_tile(const ForwardParams& p) {
  const bool plain = !(p.score.softcap > 0.f) && p.score.dropout.threshold == 0;
  const bool any_tile = plain && p.mask.kind != MaskKind::kBlockSparse, dense = p.mask.kind == MaskKind::kDense;
  const int head_dim = max_of(p.head_dim, p.head_dim_v);
  if (head_dim <= 64) return any_tile && p.seqlen_q >= 384 ? Tile{192, 128} : Tile{128, 128};
  if (head_dim <= 96) return {128, 128};
  if (head_dim <= 128) return any_tile && most_keys(p) >= 8192 ? Tile{128, 176} : Tile{128, 128};
  if (head_dim <= 192 && p.head_dim_v <= 128) return {128, 128};
  if (head_dim <= 192) return any_tile ? Tile{128, 112} : Tile{128, 64};
  return any_tile && p.seqlen_k >= (dense ? 1024 : 2048) ? Tile{128, 80} : Tile{128, 64};
}

}  // namespace flashsdk::sm90
