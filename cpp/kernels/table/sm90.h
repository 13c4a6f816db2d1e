// The table of SM90 kernels. A row is a tile; for each of its sets of features, and each dtype, there is one kernel,
// which serves all masks.
//
// To add a tile, add a row; of the forward's, also say in sm90/forward/tiles.h which calls get it. The backward's are
// taken in the order of this table. Sets of features that no row has are left to sm80; calls with dropout alone take
// kCapped where there is no kDropout. All backward kernels spill some (gpu_kernels.csv): in the warps that load, walk
// and add, with 24 registers, and of values used once a tile. A third of the forward's do, none in its main loop.
#pragma once

#include "table/row.h"

namespace flashsdk::table {

// Columns of a wgmma that cute has without CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED. That header is twice as long as all
// others together: a file that needs none of it compiles in half the time (18 in place of 37 s).
constexpr bool is_default_wgmma(int columns) {
  for (const int n : {8, 16, 32, 64, 96, 128, 192, 256})
    if (n == columns) return true;
  return false;
}

// Measurements: docs/dev/log-sm90-forward.md.
struct Sm90Forward {
  HeadDims head_dim;
  Tile tile;                         // queries × keys
  int stages_k, stages_v, stages_q;  // buffers
  struct Tuning {
    bool tries = false;  // exponentials by the maximum so far: sm90/forward/forward.h
    // Warpgroups start their products one after another. Those of other sizes run under each other's exponentials by
    // themselves, once a try has made these short.
    bool turns = false;
    // Messages are read before their keys are there. It pays where registers and the time between two turns allow.
    bool reads_ahead = false;
    // In bf16, the tiles of a band come outwards from the last one of which all queries see the first key, not from the
    // first. Of that one most queries see a part, whose maximum may be far below the row's: fp16 has no room for that.
    bool from_last_begun_by_all = false;
  } tuning;
  Kernels kernels;
};

// Of a thread: what S, P and the output take, and what one that loads and one that computes are given. What loading
// does not need, computing gets.
struct ForwardRegisters {
  int tile, load, compute;
};
constexpr ForwardRegisters registers_of(const Sm90Forward& row) {
  const int tile = row.tile.n / 2 + row.tile.n / 4 + row.head_dim.v / 2;
  if (row.tile.m != 128) return {tile, 32, 160};
  return tile > 176 ? ForwardRegisters{tile, 40, 232} : ForwardRegisters{tile, 56, 224};
}

constexpr Sm90Forward::Tuning kTurns{.turns = true};
constexpr Sm90Forward::Tuning kTries{.tries = true};
constexpr Sm90Forward::Tuning kTriesInTurns{.tries = true, .turns = true, .from_last_begun_by_all = true};
constexpr Sm90Forward::Tuning kTriesReadingAhead{
    .tries = true, .turns = true, .reads_ahead = true, .from_last_begun_by_all = true};

// With a bias, its tile in shared memory leaves room for fewer buffers or keys.
// clang-format off
constexpr Sm90Forward kSm90Forward[] = {
    {.head_dim = 64, .tile = {192, 128}, .stages_k = 4, .stages_v = 4, .stages_q = 2, .tuning = kTriesInTurns,
     .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = 64, .tile = {192, 128}, .stages_k = 4, .stages_v = 3, .stages_q = 2, .tuning = kTriesInTurns,
     .kernels = every_mask(kBias, kBiasDropout)},
    {.head_dim = 64, .tile = {128, 128}, .stages_k = 4, .stages_v = 4, .stages_q = 2, .tuning = kTriesInTurns,
     .kernels = every_mask(kNone, kCapped, kAlibi, kBias, kBiasDropout)},

    {.head_dim = 96, .tile = {128, 128}, .stages_k = 3, .stages_v = 2, .stages_q = 2, .tuning = kTriesReadingAhead,
     .kernels = every_mask(kNone, kCapped, kAlibi, kBias, kBiasDropout)},

    {.head_dim = 128, .tile = {128, 128}, .stages_k = 3, .stages_v = 2, .stages_q = 2, .tuning = kTriesReadingAhead,
     .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = 128, .tile = {128, 128}, .stages_k = 2, .stages_v = 2, .stages_q = 2, .tuning = kTriesReadingAhead,
     .kernels = every_mask(kBias, kBiasDropout)},

    {.head_dim = {192, 128}, .tile = {128, 128}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTurns,
     .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = {192, 128}, .tile = {128, 64}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTurns,
     .kernels = every_mask(kBias)},

    {.head_dim = 192, .tile = {128, 112}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTurns,
     .kernels = every_mask(kNone, kAlibi)},
    {.head_dim = 192, .tile = {128, 64}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTurns,
     .kernels = every_mask(kNone, kCapped, kAlibi, kBias)},

    {.head_dim = 256, .tile = {128, 80}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTries,
     .kernels = every_mask(kNone, kAlibi)},
    {.head_dim = 256, .tile = {128, 64}, .stages_k = 2, .stages_v = 2, .stages_q = 1, .tuning = kTurns,
     .kernels = every_mask(kNone, kCapped, kAlibi, kBias)},
};
// clang-format on

// Measurements: docs/dev/log-sm90-backward.md.
struct Sm90Backward {
  HeadDims head_dim;
  Tile tile;                // above head_dim 128, 128 keys are a cluster's of two CTAs
  int stages_do, stages_k;  // buffers; Q has as many as dO up to head_dim 128, one more above
  bool staggered = false;   // see cuda::QueryStream
  Kernels kernels;
};

// A cluster refuses some calls (sm90/backward/launch.h): at head_dim 256 there is the tile of one CTA, too.
// clang-format off
constexpr Sm90Backward kSm90Backward[] = {
    {.head_dim = 64, .tile = {128, 128}, .stages_do = 2, .stages_k = 2,
     .kernels = every_mask(kNone, kDropout, kCapped, kAlibi, kBias, kBiasDropout)},
    {.head_dim = 96, .tile = {64, 128}, .stages_do = 2, .stages_k = 1, .staggered = true,
     .kernels = every_mask(kNone, kDropout, kCapped, kAlibi, kBias, kBiasDropout)},
    {.head_dim = 128, .tile = {64, 128}, .stages_do = 2, .stages_k = 1, .staggered = true,
     .kernels = every_mask(kNone, kDropout, kCapped, kAlibi, kBias, kBiasDropout)},
    {.head_dim = {192, 128}, .tile = {64, 64}, .stages_do = 1, .stages_k = 1,
     .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = 192, .tile = {64, 64}, .stages_do = 1, .stages_k = 1, .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = 256, .tile = {64, 128}, .stages_do = 1, .stages_k = 1, .kernels = every_mask(kNone, kCapped, kAlibi)},
    {.head_dim = 256, .tile = {64, 64}, .stages_do = 1, .stages_k = 1, .kernels = every_mask(kNone, kCapped, kAlibi)},
};
// clang-format on

// Whether a row's products ask for other widths: of scores and of the output.
constexpr bool extends_wgmma(const Sm90Forward& row) {
  return !is_default_wgmma(row.tile.n) || !is_default_wgmma(row.head_dim.v);
}
// … of Sᵀ and dPᵀ, dK and dV; those of dQ are as wide as Sᵀ or half of it.
constexpr bool extends_wgmma(const Sm90Backward& row) {
  return !is_default_wgmma(row.tile.m) || !is_default_wgmma(row.head_dim.qk) || !is_default_wgmma(row.head_dim.v);
}

// Dropout without softcap is drawn for a warpgroup at once, up to head_dim 128: sm90/backward/dropout_bytes.h.
constexpr bool draws_at_once(const Sm90Backward& row, Features f) {
  return has_dropout(f) && !has_softcap(f) && row.head_dim.qk <= 128;
}

}  // namespace flashsdk::table
