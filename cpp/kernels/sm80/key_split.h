// Few queries and many keys, as in decoding: the keys of a tile of queries are dealt to several thread blocks, of which
// there would else be too few for the device, and a second kernel joins what these have found (Flash-Decoding,
// https://pytorch.org/blog/flash-decoding/).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/mask_policy.h"
#include "common/params.h"

namespace flashsdk::sm80 {

inline constexpr int kMostKeyParts = 128;

// Rows of a tile that are queries of one head.
struct OwnRows {
  static constexpr bool kShared = false;
};
// Rows that the heads of a group share, as they read the same keys: row r of a tile's head is query r / heads of the
// r % heads-th of them.
struct SharedRows {
  static constexpr bool kShared = true;
  int heads;  // 1: each head has its own
  FLASHSDK_HD int query(int row) const { return row / heads; }
  FLASHSDK_HD int head(int tile_head, int row) const { return tile_head * heads + row % heads; }
};

// How many heads share a tile: those of a group, where there are few queries of many keys, and a head has nothing of
// its own but its q. (With one query each, cpp/src/pack_heads.cpp has made rows of the heads before.)
inline int heads_sharing(const ForwardParams& p) {
  constexpr int kMostRows = 128, kManyKeys = 512, kMostTiles = 65535;  // of heads and sequences, in a grid
  const int group = p.heads_per_group();
  const bool alike = p.mask.kind != MaskKind::kBlockSparse && p.mask.user == nullptr &&
                     missing(Features::kSoftcap, p.score.features()) == Features::kNone;
  const bool few = std::int64_t{p.seqlen_q} * group <= kMostRows && p.seqlen_k >= kManyKeys &&
                   std::int64_t{p.batch} * p.num_heads_kv <= kMostTiles;
  return alike && few ? group : 1;
}

// Into how many parts the keys are split: what takes the least time. 1: not at all. Where there are thread blocks for
// half of the multiprocessors anyway, other kernels are faster. In 32nds of what a thread block alone on a
// multiprocessor takes for a tile of keys, some 1 µs on an H200; fitted to measurements there
// (benchmarks/results/sm80_key_parts.csv).
inline int key_parts(std::int64_t query_tiles, int keys, int tile, int multiprocessors, int blocks_each) {
  constexpr int kTile = 32, kSharedTile = 60;  // of these kernels, alone on a multiprocessor and beside another
  constexpr float kOthersKey = 24.f / 64.f;    // of those that would have the problem else, for a key
  constexpr int kJoin = 256, kJoinPart = 1;    // what the second kernel adds, on the host too, and for each part
  if (query_tiles == 0 || 2 * query_tiles > multiprocessors) return 1;
  const int key_tiles = ceil_div(keys, tile);
  int best = 1;
  auto least = static_cast<std::int64_t>(kOthersKey * static_cast<float>(keys));
  for (int parts = 2; parts <= min_of(key_tiles, kMostKeyParts); ++parts) {
    const std::int64_t blocks = query_tiles * parts;
    if (blocks > std::int64_t{multiprocessors} * blocks_each) break;
    const int each = blocks > multiprocessors ? kSharedTile : kTile;
    const std::int64_t time = std::int64_t{each} * ceil_div(key_tiles, parts) + kJoin + kJoinPart * parts;
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// The same of a problem, by no fewer keys than a tile of its queries sees; sharing: heads_sharing().
inline int key_parts(const ForwardParams& p, int sharing, Tile tile, int multiprocessors, int blocks_each) {
  int keys = p.seqlen_k;
  if (p.mask.kind == MaskKind::kBand) {
    const BandParam& band = p.mask.band;
    keys = clamp_index(band.left + band.right + min_of(tile.m, p.seqlen_q), keys);
    if (band.top_left) keys = min_of(keys, clamp_index(p.seqlen_q + band.right, keys));
  }
  const std::int64_t query_tiles =
      std::int64_t{ceil_div(p.seqlen_q * sharing, tile.m)} * (p.num_heads / sharing) * p.batch;
  const int parts = key_parts(query_tiles, keys, tile.n, multiprocessors, blocks_each);
  return p.num_splits > 0 ? min_of(parts, p.num_splits) : parts;
}

// What the online softmax knows of a row: its reference, which the largest score exceeds by kSlack at most, and the sum
// of exp(score − reference). Joining is exact with any reference.
struct RowState {
  float max, sum;
};

// Where each part leaves what it has found, in the caller's workspace: (parts, batch, heads, rows of a head) rows. Those
// that packed sequences do not have are never touched.
struct KeySplit {
  int parts, columns;          // of out: head_dim_v
  SharedRows shared;
  int heads, rows_of_head;     // of tiles; of packed sequences as many as the longest may have
  std::int64_t rows;           // of a part
  float* out = nullptr;        // (parts, rows, columns), relative to the row's state
  RowState* states = nullptr;  // (parts, rows)

  // base may be null to learn the size alone.
  KeySplit(const ForwardParams& p, int parts_, void* base)
      : parts(parts_),
        columns(p.head_dim_v),
        shared{heads_sharing(p)},
        heads(p.num_heads / shared.heads),
        rows_of_head(p.seqlen_q * shared.heads),
        rows(std::int64_t{p.batch} * heads * rows_of_head) {
    out = static_cast<float*>(base);
    states = reinterpret_cast<RowState*>(out + parts * rows * columns);
  }
  std::size_t size() const {
    return static_cast<std::size_t>(parts * rows) * (columns * sizeof(float) + sizeof(RowState));
  }
  FLASHSDK_HD std::int64_t row(int part, int batch, int head, int query) const {
    return part * rows + (std::int64_t{batch} * heads + head) * rows_of_head + query;
  }
};

}  // namespace flashsdk::sm80
