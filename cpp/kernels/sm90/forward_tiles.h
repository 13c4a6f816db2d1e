// Which of the forward's tiles a problem gets: the one place that decides it.
#pragma once

#include "common/params.h"
#include "common/tile_walk.h"

namespace flashsdk::sm90 {

// The measurements are in docs/sm90-forward.md.
inline Tile forward_tile(const ForwardParams& p) {
  const int head_dim = max_of(p.head_dim, p.head_dim_v);
  const bool dense = p.mask.kind == MaskKind::kDense, sparse = p.mask.kind == MaskKind::kBlockSparse;
  const bool plain = !(p.score.softcap > 0.f) && p.score.dropout.threshold == 0;
  if (head_dim <= 64) return !sparse && plain && p.seqlen_q >= 2048 ? Tile{192, 128} : Tile{128, 128};
  if (head_dim <= 128) return dense && plain && p.seqlen_k >= 2048 && head_dim > 96 ? Tile{128, 176} : Tile{128, 128};
  if (head_dim <= 192) return p.head_dim_v <= 128 ? Tile{128, 128} : dense && plain ? Tile{128, 112} : Tile{128, 64};
  return dense && plain ? Tile{128, 80} : Tile{128, 64};
}

}  // namespace flashsdk::sm90
