// The table of SM80 kernels. A row is a tile; for each dtype, set of features and mask that it names there is one
// kernel. Measured on an H200.
//
// To add a tile, add a row. A call takes the first kernel that fits: smaller head dimensions first, then fewer
// features, then in the order of this table. kAll serves every set of features that has no kernel of its own.
#pragma once

#include "table/row.h"

namespace flashsdk::table {

struct Sm80Forward {
  HeadDims head_dim;
  Tile tile;  // queries × keys
  int warps;
  int stages = 1;  // buffers of K and V
  bool q_in_registers = false;
  int blocks = 2;              // CTAs a multiprocessor should hold: caps the registers
  bool any_alignment = false;  // takes tensors that are not aligned to 16 bytes, and head_dim that is no multiple of 8
  int column_warps = 1;        // above head_dim 256, of the warps those that share the columns of the same rows
  Kernels kernels;

  // Whether warps that share rows tell each other the scores of some keys each.
  constexpr bool shares_scores() const { return column_warps > 1 && tile.n % (16 * column_warps) == 0; }
};
struct Sm80FewRowsForward : Sm80Forward {};
// Of keys and values in float8_e4m3fn.
struct Sm80Fp8Forward : Sm80Forward {};
struct Sm80Fp8SplitForward : Sm80FewRowsForward {};

// Q, K and V tiles of 16 bits, and scores.
constexpr int smem_bytes(const Sm80Forward& row) {
  const int keys = row.stages * row.tile.n * (row.head_dim.qk + row.head_dim.v);
  return 2 * (row.tile.m * row.head_dim.qk + keys) + (row.shares_scores() ? 4 * row.tile.m * row.tile.n : 0);
}
// The same, and K and V as they are in memory.
constexpr int smem_bytes(const Sm80Fp8Forward& row) {
  return smem_bytes(static_cast<const Sm80Forward&>(row)) + 2 * row.head_dim.qk * row.tile.n;
}
// K and V, Q, and a state of each row for each warp.
constexpr int smem_bytes(const Sm80FewRowsForward& row) {
  return 2 * row.head_dim.qk * (2 * row.stages * row.tile.n + row.tile.m) + 8 * row.warps * row.tile.m;
}
// The same with K and V as they are in memory.
constexpr int smem_bytes(const Sm80Fp8SplitForward& row) {
  return 2 * row.head_dim.qk * (row.stages * row.tile.n + row.tile.m) + 8 * row.warps * row.tile.m;
}

// CTAs of four warps, two a multiprocessor, leave 255 registers a thread, as one of eight in the backward. Some plain
// kernels need a few more (gpu_kernels.csv, bytes of stack): up to 48, in the main loops none to 24 loads and stores.
// The tiles of 256 that are for GPUs with little shared memory need up to 808. At head_dim 64, smaller tiles, which
// spill nothing, were slower.
//
// Tiles for layouts divide the usual blocks of 64 and 128, and leave registers for lists and features. All features
// take registers that the other tiles do not have, a mask more of them: with fewer elements a thread, slower in
// themselves, less is spilled (benchmarks/results/sm80_features.csv). ALiBi alone takes so few that it has the tiles of
// kNone (alibi_bias.csv).
// clang-format off
constexpr Sm80Forward kSm80Forward[] = {
    {.head_dim = 32, .tile = {128, 128}, .warps = 4, .q_in_registers = true, .kernels = no_layout(kNone, kAlibi)},
    {.head_dim = 32, .tile = {128, 64}, .warps = 4, .q_in_registers = true,
     .kernels = layouts(kNone) | every_mask(kDropout, kAll) | no_layout(kBias)},

    {.head_dim = 64, .tile = {128, 128}, .warps = 4, .kernels = no_layout(kNone, kDropout, kAlibi)},
    {.head_dim = 64, .tile = {128, 64}, .warps = 4, .q_in_registers = true,
     .kernels = layouts(kNone, kDropout) | no_layout(kBias)},
    {.head_dim = 64, .tile = {128, 64}, .warps = 4, .kernels = kernels_for(kDense, kAll)},
    {.head_dim = 64, .tile = {64, 64}, .warps = 4, .blocks = 3, .kernels = kernels_for(kBandOrLayout, kAll)},

    {.head_dim = 96, .tile = {128, 64}, .warps = 4,
     .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    {.head_dim = 128, .tile = {128, 48}, .warps = 4, .kernels = no_layout(kNone, kAlibi)},
    {.head_dim = 128, .tile = {128, 64}, .warps = 4,
     .kernels = layouts(kNone) | every_mask(kDropout) | no_layout(kBias)},
    {.head_dim = 128, .tile = {64, 64}, .warps = 4, .kernels = every_mask(kAll)},

    {.head_dim = 192, .tile = {64, 64}, .warps = 4,
     .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    {.head_dim = 256, .tile = {64, 64}, .warps = 4,
     .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    // What takes the rest: tensors of any alignment, devices with less shared memory (99 KiB do for the last of each
    // head_dim), and layouts with smaller blocks. They cover the smaller head dimensions too. One warp a tile of
    // 16 × 16 takes any block size, at a price.
    {.head_dim = 64, .tile = {64, 64}, .warps = 4, .any_alignment = true, .kernels = every_mask(kAll)},
    {.head_dim = 64, .tile = {16, 16}, .warps = 1, .blocks = 1, .any_alignment = true, .kernels = layouts(kAll)},
    {.head_dim = 128, .tile = {64, 64}, .warps = 4, .any_alignment = true, .kernels = every_mask(kAll)},
    {.head_dim = 128, .tile = {16, 16}, .warps = 1, .blocks = 1, .any_alignment = true, .kernels = layouts(kAll)},
    {.head_dim = 256, .tile = {64, 64}, .warps = 4, .blocks = 1, .any_alignment = true, .kernels = every_mask(kAll)},
    {.head_dim = 256, .tile = {16, 16}, .warps = 1, .blocks = 1, .any_alignment = true, .kernels = layouts(kAll)},

    // Wide heads. The first is for GPUs with 227 KiB, the next for those with 163 and for features, the last for all.
    // Features come with any alignment alone, as such heads are few (docs/dev/gpu.md, "Wide heads").
    {.head_dim = {576, 512}, .tile = {64, 64}, .warps = 8, .blocks = 1, .column_warps = 2,
     .kernels = every_mask(kNone)},
    {.head_dim = {576, 512}, .tile = {64, 32}, .warps = 8, .blocks = 1, .any_alignment = true, .column_warps = 2,
     .kernels = every_mask(kAll)},
    {.head_dim = {576, 512}, .tile = {16, 16}, .warps = 2, .blocks = 1, .any_alignment = true, .column_warps = 2,
     .kernels = every_mask(kAll)},
};

// Few rows, as in decoding: tiles whose keys are dealt to the warps, 4 KB of K and of V to each, or 8 KB.
constexpr Sm80FewRowsForward kSm80FewRowsForward[] = {
    {{.head_dim = 64, .tile = {16, 128}, .warps = 4, .stages = 2, .blocks = 3, .kernels = no_layout(kNone, kAll)}},
    {{.head_dim = 128, .tile = {16, 64}, .warps = 4, .stages = 2, .blocks = 3, .kernels = no_layout(kNone, kAll)}},
    {{.head_dim = 256, .tile = {16, 32}, .warps = 2, .stages = 2, .blocks = 3, .kernels = no_layout(kNone, kAll)}},
};

// Few queries: CTAs of four warps, two a multiprocessor, each with a part of the keys. Smaller head dimensions take
// these too: what a tile leaves empty is not read from memory, which is what bounds them.
constexpr Sm80Forward kSm80SplitForward[] = {
    {.head_dim = 64, .tile = {64, 128}, .warps = 4, .stages = 2, .q_in_registers = true,
     .kernels = no_layout(kNone, kAll)},
    {.head_dim = 128, .tile = {64, 64}, .warps = 4, .stages = 2, .q_in_registers = true,
     .kernels = no_layout(kNone, kAll)},
    {.head_dim = 256, .tile = {64, 64}, .warps = 4, .kernels = no_layout(kNone, kAll)},
    // Without features there is another for a v in the memory of k, as latent attention (MLA) has it.
    {.head_dim = {576, 512}, .tile = {32, 32}, .warps = 4, .column_warps = 2, .kernels = no_layout(kNone, kAll)},
};

// Keys and values in float8_e4m3fn: few kernels, which take all calls between them. Each head_dim has tiles for calls
// without features and for all others, of any alignment; layouts of small blocks share one kernel.
constexpr Sm80Fp8Forward kSm80Fp8Forward[] = {
    {{.head_dim = 64, .tile = {128, 64}, .warps = 4, .kernels = every_mask(kNone)}},
    {{.head_dim = 128, .tile = {128, 32}, .warps = 4, .kernels = every_mask(kNone)}},
    {{.head_dim = 256, .tile = {64, 64}, .warps = 4, .blocks = 1, .kernels = every_mask(kNone)}},
    {{.head_dim = 64, .tile = {64, 64}, .warps = 4, .any_alignment = true, .kernels = every_mask(kAll)}},
    {{.head_dim = 128, .tile = {64, 64}, .warps = 4, .any_alignment = true, .kernels = every_mask(kAll)}},
    {{.head_dim = 256, .tile = {64, 32}, .warps = 4, .any_alignment = true, .kernels = every_mask(kAll)}},
    {{.head_dim = 256, .tile = {16, 16}, .warps = 1, .blocks = 1, .any_alignment = true, .kernels = layouts(kAll)}},
};
// Few rows: tiles whose keys are dealt to the warps, 4 KB of K and of V to each.
constexpr Sm80Fp8SplitForward kSm80Fp8SplitForward[] = {
    {{{.head_dim = 64, .tile = {16, 256}, .warps = 4, .stages = 2, .blocks = 3, .kernels = no_layout(kNone)}}},
    {{{.head_dim = 64, .tile = {16, 256}, .warps = 4, .stages = 2, .kernels = no_layout(kAll)}}},
    {{{.head_dim = 128, .tile = {16, 128}, .warps = 4, .stages = 2, .blocks = 3, .kernels = no_layout(kNone)}}},
    {{{.head_dim = 128, .tile = {16, 128}, .warps = 4, .stages = 2, .kernels = no_layout(kAll)}}},
    {{{.head_dim = 256, .tile = {16, 64}, .warps = 4, .stages = 2, .kernels = no_layout(kNone, kAll)}}},
};
// clang-format on

struct Sm80Backward {
  HeadDims head_dim;
  Tile tile;
  int warps;
  int warps_s, warps_dk, warps_dq;  // of these along the keys of S and of dK and dV, along the queries of dQ
  int blocks = 1;
  bool staggered = false;  // see cuda::QueryStream
  bool any_alignment = false;
  int copies = 1;  // above head_dim 256, of the warps how many hold the same scores; of these warps_s
  int stages = 2;  // buffers of Q and dO
  Kernels kernels;

  // Whether P and dS are operands from registers, so that P needs no place.
  constexpr bool register_operands() const { return warps_s == warps && warps_dk == warps; }
};

// K and V, stages of Q and dO with lse and delta, and dS, P too unless it stays in registers. Of wide heads S and dP.
constexpr int smem_bytes(const Sm80Backward& row) {
  const int keys = row.tile.n * row.head_dim.qk, queries = row.tile.m * row.head_dim.qk;
  const int scores = row.tile.m * row.tile.n * (row.register_operands() ? 1 : 2);
  const int exchanged = row.copies > 1 ? 8 * row.tile.m * row.tile.n : 0;
  return 2 * (2 * keys + 2 * row.stages * queries + scores) + exchanged + row.stages * (8 * row.tile.m + 16);
}

// clang-format off
constexpr Sm80Backward kSm80Backward[] = {
    {.head_dim = 32, .tile = {32, 128}, .warps = 4, .warps_s = 4, .warps_dk = 4, .warps_dq = 2, .blocks = 2,
     .staggered = true, .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    {.head_dim = 64, .tile = {32, 128}, .warps = 4, .warps_s = 4, .warps_dk = 4, .warps_dq = 2, .blocks = 2,
     .staggered = true, .kernels = every_mask(kNone, kDropout) | no_layout(kAlibi, kBias)},
    {.head_dim = 64, .tile = {64, 128}, .warps = 8, .warps_s = 8, .warps_dk = 8, .warps_dq = 4,
     .kernels = every_mask(kAll)},

    {.head_dim = 96, .tile = {64, 128}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 4,
     .staggered = true, .kernels = every_mask(kNone, kDropout) | no_layout(kAlibi, kBias)},
    {.head_dim = 96, .tile = {64, 128}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 4,
     .kernels = every_mask(kAll)},

    {.head_dim = 128, .tile = {64, 128}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 2,
     .kernels = every_mask(kNone, kDropout) | no_layout(kAlibi, kBias)},
    {.head_dim = 128, .tile = {32, 128}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 2,
     .kernels = every_mask(kAll)},

    {.head_dim = 192, .tile = {64, 64}, .warps = 8, .warps_s = 2, .warps_dk = 2, .warps_dq = 2,
     .staggered = true, .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    {.head_dim = 256, .tile = {64, 64}, .warps = 8, .warps_s = 2, .warps_dk = 2, .warps_dq = 2,
     .staggered = true, .kernels = every_mask(kNone, kDropout, kAll) | no_layout(kAlibi, kBias)},

    // What takes the rest, as above. 16 × 32 is for GPUs with little shared memory.
    {.head_dim = 64, .tile = {64, 64}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 4, .any_alignment = true,
     .kernels = every_mask(kAll)},
    {.head_dim = 64, .tile = {16, 16}, .warps = 1, .warps_s = 1, .warps_dk = 1, .warps_dq = 1, .any_alignment = true,
     .kernels = layouts(kAll)},
    {.head_dim = 128, .tile = {32, 64}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 2, .any_alignment = true,
     .kernels = every_mask(kAll)},
    {.head_dim = 128, .tile = {16, 16}, .warps = 1, .warps_s = 1, .warps_dk = 1, .warps_dq = 1, .any_alignment = true,
     .kernels = layouts(kAll)},
    {.head_dim = 256, .tile = {32, 64}, .warps = 8, .warps_s = 4, .warps_dk = 4, .warps_dq = 2, .any_alignment = true,
     .kernels = every_mask(kAll)},
    {.head_dim = 256, .tile = {16, 32}, .warps = 2, .warps_s = 2, .warps_dk = 2, .warps_dq = 1, .any_alignment = true,
     .kernels = every_mask(kAll)},
    {.head_dim = 256, .tile = {16, 16}, .warps = 1, .warps_s = 1, .warps_dk = 1, .warps_dq = 1, .any_alignment = true,
     .kernels = layouts(kAll)},

    // Wide heads: for GPUs with 227 KiB of shared memory, with 163 and for features, and for all.
    {.head_dim = 512, .tile = {32, 32}, .warps = 8, .warps_s = 2, .warps_dk = 1, .warps_dq = 1, .staggered = true,
     .copies = 2, .kernels = every_mask(kNone)},
    {.head_dim = 512, .tile = {32, 32}, .warps = 8, .warps_s = 2, .warps_dk = 1, .warps_dq = 1, .staggered = true,
     .any_alignment = true, .copies = 2, .stages = 1, .kernels = every_mask(kAll)},
    {.head_dim = 512, .tile = {16, 16}, .warps = 4, .warps_s = 1, .warps_dk = 1, .warps_dq = 1, .any_alignment = true,
     .copies = 4, .stages = 1, .kernels = every_mask(kAll)},
};
// clang-format on

}  // namespace flashsdk::table
