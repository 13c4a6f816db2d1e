// Which of the forward's tiles a problem gets, among those of its head_dim and features in table/sm90.h: the one place
// that decides it. The measurements are in docs/dev/log-sm90-forward.md.
#pragma once

#include "common/params.h"
#include "common/tile_walk.h"
#include "table/sm90.h"

namespace flashsdk::sm90 {

// What the choice depends on.
struct ForwardShape {
  table::HeadDims head_dim;
  Features features;  // that are asked for
  MaskKind mask;
  int seqlen_q, seqlen_k;
};

// Lengths from which on choose_forward_tile() chooses otherwise, and 1: table/check.h asks for all of them.
constexpr int kChoiceLengths[] = {1, 384, 640, 1024, 2048};

// Layouts need tiles that divide their blocks, and dropout a number of keys that is a multiple of 32. Long tiles waste
// rows and keys, and leave multiprocessors idle, where sequences are short or cut by a band. So at head_dim 64 they
// come from 384 queries on without a mask or with a bias, else from 640 on. That is right for windows and dropout;
// causal ALiBi would gain 7 to 12 % from 384 on, but has no rule of its own.
constexpr Tile choose_forward_tile(const ForwardShape& s) {
  const bool bias = has_bias(s.features);  // takes shared memory
  const bool plain = s.features == Features::kNone || s.features == Features::kAlibi;
  const bool layout = s.mask == MaskKind::kBlockSparse, dense = s.mask == MaskKind::kDense;
  const int head_dim = max_of(s.head_dim.qk, s.head_dim.v);
  if (head_dim <= 64) return !layout && s.seqlen_q >= (dense || bias ? 384 : 640) ? Tile{192, 128} : Tile{128, 128};
  if (head_dim <= 128) return {128, 128};
  if (head_dim <= 192 && s.head_dim.v <= 128) return {128, bias ? 64 : 128};
  if (head_dim <= 192) return plain && !layout ? Tile{128, 112} : Tile{128, 64};
  return plain && !layout && s.seqlen_k >= (dense ? 1024 : 2048) ? Tile{128, 80} : Tile{128, 64};
}

inline Tile forward_tile(const ForwardParams& p) {
  return choose_forward_tile({{p.head_dim, p.head_dim_v}, p.score.features(), p.mask.kind, p.seqlen_q, p.seqlen_k});
}

}  // namespace flashsdk::sm90
