// What the three backward kernels hand each other, and where it lies in the caller's workspace.
//
// Rows are padded to whole query tiles, so that the main kernel reads and adds without asking whether a row exists:
// a missing row, and one that sees no key, has lse +inf, and so probability 0 everywhere.
//
// P = exp(score − lse) takes over the rounding of the lse, and 0·NaN is NaN. Where the one would show, or a row that
// sees no key may hold the other, a tile is marked: its scores are first reduced by `top`, and lse_log2 is relative to
// that; rows of lse +inf, whose top is +inf too, are cleared. Rows behind the end of a packed sequence are the next
// one's: the main kernels see to it that they are zeros before the first product, and they need no mark.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/packed_tiles.h"
#include "common/params.h"
#include "common/seqlen_info.h"

namespace flashsdk::cuda {

// What the scores of a tile of queries are lowered by, in the workspace and in shared memory.
template <int kRows>
struct alignas(16) LseTile {
  float lse_log2[kRows];  // in units of log2
  const float* top;       // (kRows), null where the tile is not marked
};

struct BackwardWorkspace {
  std::int64_t tiles_per_head = 0;  // query tiles of all sequences
  int tile_rows = 0, head_dim = 0, parts = 1;
  float* dq_accum = nullptr;     // (num_heads, tiles_per_head, tile_rows · head_dim), each tile in fragment order
  char* lse = nullptr;           // (num_heads, tiles_per_head): LseTile<tile_rows>
  float* minus_delta = nullptr;  // (num_heads, tiles_per_head, tile_rows): dlse − rowsum(dout∘out)
  float* top = nullptr;          // (num_heads, tiles_per_head, tile_rows): of marked tiles
  float* sink_terms = nullptr;   // (num_heads, tiles_per_head, tile_rows): of dsink, each query's; null without sinks
  int* dq_order = nullptr;       // (num_heads, tiles_per_head, parts), zeros at first: of those who add to dq_accum, in
                                 // deterministic calls the turns taken at a tile, in its first word (turn_order.h);
                                 // in others sm90's (sm90/backward/dq_order.h)
  int* next_work = nullptr;      // key tiles that thread blocks have taken off the schedule, beside their first

  // base may be null to learn the size alone. A tile of dq_accum is added to in `parts`.
  BackwardWorkspace(const ForwardParams& p, int tile_rows_, int head_dim_, void* base, int parts_ = 1)
      : tile_rows(tile_rows_), head_dim(head_dim_), parts(parts_) {
    tiles_per_head = p.packed() ? first_packed_tile(p.total_q, tile_rows, p.batch)
                                : std::int64_t{p.batch} * ceil_div(p.seqlen_q, tile_rows);
    const std::int64_t tiles = tiles_per_head * p.num_heads;
    dq_accum = static_cast<float*>(base);
    const std::int64_t lse_words = tile_rows + static_cast<int>(sizeof(LseTile<4>) / sizeof(float)) - 4;
    lse = reinterpret_cast<char*>(dq_accum + tiles * tile_rows * head_dim);
    minus_delta = dq_accum + tiles * (tile_rows * head_dim + lse_words);
    top = minus_delta + tiles * tile_rows;
    dq_order = reinterpret_cast<int*>(top + tiles * tile_rows);
    next_work = dq_order + tiles * parts;
    std::int64_t words = tiles * (tile_rows * (head_dim + 2) + lse_words + parts) + 1;
    if (p.sink.ptr != nullptr) {
      sink_terms = dq_accum + words;
      words += tiles * tile_rows;
    }
    size = static_cast<std::size_t>(words) * sizeof(float);
  }
  std::size_t size = 0;  // bytes

  // kRows: tile_rows.
  template <int kRows>
  FLASHSDK_HD LseTile<kRows>& lse_of(std::int64_t tile) const {
    return reinterpret_cast<LseTile<kRows>*>(lse)[tile];
  }

  // Index of a query tile over all heads and sequences. kTileRows: tile_rows, where the compiler knows it: a division
  // by it, for each tile that a kernel walks, is a shift then.
  template <int kTileRows = 0>
  FLASHSDK_HD std::int64_t tile(const ForwardParams& p, const SeqlenInfo& seq, int batch, int head, int m_block) const {
    return head * tiles_per_head + first_tile<kTileRows>(p, seq, batch) + m_block;
  }
  // Of a sequence's first query tile, in the first head.
  template <int kTileRows = 0>
  FLASHSDK_HD std::int64_t first_tile(const ForwardParams& p, const SeqlenInfo& seq, int batch) const {
    const int rows = kTileRows != 0 ? kTileRows : tile_rows;
    return p.packed() ? first_packed_tile(seq.offset_q, rows, batch) : std::int64_t{batch} * ceil_div(p.seqlen_q, rows);
  }
};

}  // namespace flashsdk::cuda
