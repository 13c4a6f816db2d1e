// Which of the forward's tiles a problem gets: the one place that decides it. The measurements are in
// docs/dev/log-sm90-forward.md.
#pragma once

#include "common/params.h"
#include "common/tile_walk.h"

namespace flashsdk::sm90 {

// Layouts need tiles that divide their blocks, and dropout a number of keys that is a multiple of 32. Long tiles waste
// rows and keys, and leave multiprocessors idle, where sequences are short or cut by a band: at head_dim 64 to 640
// queries, which is right for windows and dropout; causal ALiBi is 7 to 12 % faster with the long ones from 384 on.
inline Tile forward_tile(const ForwardParams& p) {
  const bool bias = p.score.bias.ptr != nullptr;  // takes shared memory
  const bool plain = !bias && !(p.score.softcap > 0.f) && p.score.dropout.threshold == 0;
  const bool layout = p.mask.kind == MaskKind::kBlockSparse, dense = p.mask.kind == MaskKind::kDense;
  const int head_dim = max_of(p.head_dim, p.head_dim_v);
  if (head_dim <= 64) return !layout && p.seqlen_q >= (dense || bias ? 384 : 640) ? Tile{192, 128} : Tile{128, 128};
  if (head_dim <= 128) return {128, 128};
  if (head_dim <= 192 && p.head_dim_v <= 128) return {128, bias ? 64 : 128};
  if (head_dim <= 192) return plain && !layout ? Tile{128, 112} : Tile{128, 64};
  return plain && !layout && p.seqlen_k >= (dense ? 1024 : 2048) ? Tile{128, 80} : Tile{128, 64};
}

}  // namespace flashsdk::sm90
