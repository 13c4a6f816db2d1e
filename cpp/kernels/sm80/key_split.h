// Few queries and many keys, as in decoding: the keys of a tile of queries are dealt to several thread blocks, of which
// there would else be too few for the device, and a second kernel joins what these have found (Flash-Decoding,
// https://pytorch.org/blog/flash-decoding/).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/mask_policy.h"
#include "common/params.h"
#include "cuda/tile/vector_io.h"

namespace flashsdk::sm80 {

inline constexpr int kMostKeyParts = 128;
inline constexpr int kMostTiles = 1024;        // heads of all sequences whose output goes through the workspace
inline constexpr int kMostSplitTiles = 65535;  // heads of all sequences: a dimension of the second kernel's grid

// Rows of a tile that are queries of one head.
struct OwnRows {
  static constexpr bool kShared = false;
  static constexpr int heads = 1;
  FLASHSDK_HD int head(int tile_head, int) const { return tile_head; }
};
// Rows that the heads of a group share, as they read the same keys: row r of a tile's head is query r / heads of the
// r % heads-th of them.
struct SharedRows {
  static constexpr bool kShared = true;
  int heads;  // 1: each head has its own
  FLASHSDK_HD int query(int row) const { return row / heads; }
  FLASHSDK_HD int head(int tile_head, int row) const { return tile_head * heads + row % heads; }
};

// Heads that the kernels of 256 do not take.
inline bool is_wide(const ForwardParams& p) { return max_of(p.head_dim, p.head_dim_v) > 256; }
inline constexpr int kMostWideRows = 512;  // of the heads that share a tile: 4 queries of 128

// Whether v is the first columns of k, in the same memory, as latent attention (MLA) has it.
inline bool values_in_keys(const ForwardParams& p) {
  const bool same_heads = p.num_heads_kv == 1 || p.k.head == p.v.head;
  return p.k.ptr == p.v.ptr && p.k.batch == p.v.batch && p.k.row == p.v.row && same_heads && p.head_dim_v <= p.head_dim;
}

// The second kernel writes whole vectors.
inline bool can_join(const ForwardParams& p) {
  return p.head_dim_v % cuda::kVectorElements == 0 && cuda::vector_aligned(p.out);
}

// How many heads share a tile: those of a group, where there are few queries of many keys, and a head has nothing of
// its own but its q. (With one query each, cpp/src/pack_heads.cpp has made rows of the heads before.) Their output goes
// through the workspace, which many rows of few keys would not pay for.
inline int heads_sharing(const ForwardParams& p) {
  constexpr int kManyKeys = 512;
  // Of wide heads there may be 128 of one head of keys (MLA), which each would read for itself.
  const int most_rows = is_wide(p) ? kMostWideRows : 128, keys_of_row = is_wide(p) ? 1 : 16;
  const int group = p.heads_per_group();
  const std::int64_t rows = std::int64_t{p.seqlen_q} * group;
  const bool alike = p.mask.kind != MaskKind::kBlockSparse && p.mask.user == nullptr &&
                     missing(Features::kSoftcap, p.score.features()) == Features::kNone && (!p.fp8_kv() || can_join(p));
  const std::int64_t tiles = std::int64_t{p.batch} * p.num_heads_kv;
  const int most_tiles = p.fp8_kv() ? kMostSplitTiles : kMostTiles;
  const bool few = group > 1 && rows > 0 && rows <= most_rows && p.seqlen_k >= kManyKeys &&
                   p.seqlen_k >= keys_of_row * rows && tiles > 0 && tiles <= most_tiles;
  return alike && few ? group : 1;
}

// What parts take, in 32nds of what a thread block alone on a multiprocessor takes for a tile of keys, some 1 µs on an
// H100; fitted to measurements there (benchmarks/results/sm80_key_parts.csv).
struct PartCosts {
  static constexpr int kTile = 32, kSharedTile = 60;  // alone on a multiprocessor and beside another
  static constexpr int kJoin = 256, kJoinPart = 1;    // what the second kernel adds, on the host too, and for each part
  static constexpr int kStart = kSharedTile;          // of a thread block, until its first keys have come
};

// What kernels take that would have the problem else, for a key; of wide heads by the products that a key takes.
inline constexpr float kOthersKey = 24.f / 64.f, kOthersWideKey = 128.f / 64.f;
inline constexpr float kNoOthers = 0.f;  // no other is as fast, however the keys are split

// Into how many parts the keys are split: what takes the least time. 1: not at all. Where there are thread blocks for
// half of the multiprocessors anyway, other kernels are faster.
inline int key_parts(std::int64_t query_tiles, int keys, int tile, int multiprocessors, int blocks_each,
                     float others_key = kOthersKey) {
  const bool alone = others_key == kNoOthers;
  if (query_tiles == 0 || (!alone && 2 * query_tiles > multiprocessors)) return 1;
  const int key_tiles = ceil_div(keys, tile);
  int best = 1;
  auto least = alone ? INT64_MAX : static_cast<std::int64_t>(others_key * static_cast<float>(keys));
  for (int parts = alone ? 1 : 2; parts <= min_of(key_tiles, kMostKeyParts); ++parts) {
    const std::int64_t blocks = query_tiles * parts;
    if (blocks > std::int64_t{multiprocessors} * blocks_each) break;
    const int each = blocks > multiprocessors ? PartCosts::kSharedTile : PartCosts::kTile;
    const std::int64_t time =
        std::int64_t{each} * ceil_div(key_tiles, parts) + PartCosts::kJoin + PartCosts::kJoinPart * parts;
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// Of fp8 keys and values, calls of few rows a head are taken however many heads there are, split or not: no other
// kernel converts a key once. Four tiles of 16 rows take about as long as one of 128 that has to convert for each warp.
inline constexpr int kFewRows = 64, kFewRowsTile = 16;
inline bool has_few_rows(const ForwardParams& p, int sharing) {
  const std::int64_t tiles = std::int64_t{p.num_heads / sharing} * p.batch;
  return p.fp8_kv() && p.seqlen_q > 0 && p.seqlen_q * sharing <= kFewRows && tiles > 0 && tiles <= kMostSplitTiles;
}
// What they take, in units of PartCosts, fitted to an H100's times (benchmarks/results/sm80_few_rows.csv). A tile of
// keys and values is 32 KB. A thread block waits for its own instructions, until there are nearly as many as
// multiprocessors: these already ask for all that memory gives, and more of them wait for each other.
struct FewRowsCosts {
  static constexpr int kLeastGain = 0;                  // of time, in percent, that more parts have to bring
  static constexpr int kTile = 36, kTileOfMemory = 45;  // the latter times the thread blocks of a multiprocessor
  int start = 60, join = 160, join_part = 1;

  // Of `blocks` that run at once. Multiprocessors are as slow as those with the most of them.
  int tile(int blocks, int multiprocessors) const {
    const int all = blocks > multiprocessors ? round_up(blocks, multiprocessors) : blocks;
    return max_of(kTile, kTileOfMemory * all / multiprocessors);
  }
};
// What all others take whose keys are in fp8. A key of head_dim 128 takes 1.42 of these units where a thread block has
// a multiprocessor alone. What parts leave is written and read again.
struct Fp8Costs {
  static constexpr int kLeastGain = 5;  // each part has a workspace as large as the output, in fp32
  int alone, shared;
  int start = 60, join = PartCosts::kJoin, join_part = 0;

  Fp8Costs(std::int64_t rows, int columns, int tile_keys)
      : alone(ceil_div(tile_keys * columns * 142, 128 * 100)), shared(alone * 8 / 5) {
    constexpr std::int64_t kBytesOfUnit = 96 * 1024;  // that an H100 reads meanwhile
    join_part = 1 + static_cast<int>(min_of(rows * columns * 8 / kBytesOfUnit, std::int64_t{1} << 20));
  }
  int tile(int blocks, int multiprocessors) const { return blocks > multiprocessors ? shared : alone; }
};
// Into how many parts keys in fp8 are split: without a second kernel, where one part is all. Where not all thread
// blocks run at once, what counts is the last ones to start, and that each has to wait for its first keys.
template <class Costs>
int fp8_key_parts(const Costs& costs, std::int64_t query_tiles, int keys, int tile, int multiprocessors,
                  int blocks_each) {
  const int key_tiles = ceil_div(keys, tile);
  const std::int64_t slots = std::int64_t{multiprocessors} * blocks_each;
  int best = 1;
  std::int64_t least = 0;
  for (int parts = 1; parts <= max_of(1, min_of(key_tiles, kMostKeyParts)); ++parts) {
    const std::int64_t blocks = query_tiles * parts;
    const int tile_cost = costs.tile(static_cast<int>(min_of(blocks, slots)), multiprocessors);
    const std::int64_t each = std::int64_t{tile_cost} * ceil_div(key_tiles, parts) + costs.start;
    const std::int64_t joins = parts > 1 ? costs.join + std::int64_t{costs.join_part} * parts : 0;
    const std::int64_t time = (blocks + slots - 1) / slots * each + joins;
    if (parts == 1 || time < least - least * Costs::kLeastGain / 100) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// How the keys of a call are split: each sequence into `most` parts; or, where the lengths are not equal and only the
// device knows them, by a plan that it makes itself, of `planned` parts at most, and `most` of a sequence.
struct KeyParts {
  int most = 1, planned = 0;
};

// The keys that a tile of queries may see.
inline int visible_keys(const ForwardParams& p, Tile tile) {
  int keys = p.seqlen_k;
  if (p.mask.kind == MaskKind::kBand) {
    const BandParam& band = p.mask.band;
    keys = clamp_index(band.left + band.right + min_of(tile.m, p.seqlen_q), keys);
    if (band.top_left) keys = min_of(keys, clamp_index(p.seqlen_q + band.right, keys));
  }
  return keys;
}

// Of few queries in sequences of unequal lengths: one tile of them, or some where keys are fp8 (16 sequences of 64 rows
// take 240 µs, without a plan 281) or heads are wide. As many sequences as fill a device some times are left to kernels
// that share their tiles out as they come: 1024 lines of keys reach 0.94 of a read there, 128 lines 0.87 and here 0.92
// (H100). num_splits asks for parts that do not depend on who shares the batch.
inline bool plans_parts(const ForwardParams& p, int sharing, Tile tile, int multiprocessors) {
  constexpr int kManyKeys = 1024, kManyTiles = 4;
  const std::int64_t rows = std::int64_t{p.seqlen_q} * sharing;
  const int most_rows = is_wide(p) ? kMostWideRows : p.fp8_kv() ? kFewRows : tile.m;
  const std::int64_t tiles = p.num_heads / sharing * p.batch * ((rows + tile.m - 1) / tile.m);
  return p.ragged_keys() && p.num_splits == 0 && p.mask.kind != MaskKind::kBlockSparse && p.mask.user == nullptr &&
         p.batch > 1 && p.seqlen_q > 0 && rows <= most_rows && visible_keys(p, tile) >= kManyKeys && tiles > 0 &&
         tiles <= std::int64_t{kManyTiles} * multiprocessors;
}

// Tiles of queries that a sequence of one head of tiles has.
inline int tiles_of_head(const ForwardParams& p, int sharing, Tile tile) {
  return ceil_div(p.seqlen_q * sharing, tile.m);
}

// sharing: heads_sharing().
inline KeyParts key_parts(const ForwardParams& p, int sharing, Tile tile, int multiprocessors, int blocks_each,
                          float others_key = kOthersKey) {
  const int heads = p.num_heads / sharing, slots = multiprocessors * blocks_each;
  if (plans_parts(p, sharing, tile, multiprocessors)) {
    constexpr int kLongest = 8, kAll = 4;  // parts for each place where a thread block runs
    const int tiles = heads * tiles_of_head(p, sharing, tile);
    return {max_of(kAll, min_of(ceil_div(kLongest * slots, tiles * p.batch), kMostKeyParts)),
            p.batch + ceil_div(kAll * slots, tiles)};
  }
  const std::int64_t query_tiles = std::int64_t{tiles_of_head(p, sharing, tile)} * heads * p.batch;
  const int keys = visible_keys(p, tile);
  const auto of_fp8 = [&](const auto& costs) {
    return fp8_key_parts(costs, query_tiles, keys, tile.n, multiprocessors, blocks_each);
  };
  const bool is_full = query_tiles >= slots || std::int64_t{heads} * p.batch > kMostSplitTiles;
  const int parts = !p.fp8_kv() ? key_parts(query_tiles, keys, tile.n, multiprocessors, blocks_each, others_key)
                    : tile.m == kFewRowsTile ? of_fp8(FewRowsCosts{})
                    : is_full                ? 1
                                             : of_fp8(Fp8Costs(query_tiles * tile.m, p.head_dim, tile.n));
  return {p.num_splits > 0 ? min_of(parts, p.num_splits) : parts};
}

// What a plan would take: `blocks` thread blocks for `tiles` of keys, the longest with `longest` of these. Those that
// do not all run at once end within half of the longest of each other.
FLASHSDK_HD float planned_time(float blocks, float tiles, int longest, int multiprocessors, int blocks_each) {
  const float slots = static_cast<float>(multiprocessors * blocks_each), last = static_cast<float>(longest);
  const auto each =
      static_cast<float>(blocks > static_cast<float>(multiprocessors) ? PartCosts::kSharedTile : PartCosts::kTile);
  if (blocks <= slots) return each * last + PartCosts::kStart;
  return each * last / 2 + (each * tiles + PartCosts::kStart * blocks) / slots;
}

// How a sequence of so many tiles of keys is cut into parts of equal length, none above a limit.
struct PartCut {
  int parts, longest;  // tiles of the longest
  FLASHSDK_HD static PartCut of(int tiles, int limit) {
    const int parts = max_of(1, ceil_div(tiles, limit));  // without a key, one: its output is written like any other
    return {parts, ceil_div(tiles, parts)};
  }
};

// The limits that a plan tries: the longest sequence's tiles over 1, 2, … 8, 10, 12, 14, 16, 20, …, up to `most`.
inline constexpr int kTriedLimits = 32;
FLASHSDK_HD int tried_limit(int index, int longest, int most) {
  return ceil_div(max_of(1, longest), min_of(((4 + index % 4) << (index / 4)) >> 2, most));
}

// A part of a plan, and what a thread block learns of it.
struct alignas(16) PlannedPart {
  int batch, index, parts;  // which of how many
};
struct KeyPart {
  int batch, index, parts;  // parts: 0 where there is nothing to do
  int slot;                 // where it leaves what it has found
};

// What the online softmax knows of a row: its reference, which the largest score exceeds by kSlack at most, and the sum
// of exp(score − reference). Joining is exact with any reference.
struct RowState {
  float max, sum;
};

// Where each part leaves what it has found, in the caller's workspace: (slots, heads, rows of a head) rows. Slot
// part · batch + b is that of a part of sequence b; with a plan, those of a sequence are neighbours. Rows that packed
// sequences do not have are never touched.
struct KeySplit {
  static constexpr bool kSplit = true;
  int batch, parts, slots;  // parts: of a sequence, at most
  int columns;              // of out: head_dim_v
  SharedRows shared;
  int heads, rows_of_head;      // of tiles; of packed sequences as many as the longest may have
  int* ends = nullptr;          // (batch): slots of the sequences so far; null where there is no plan
  PlannedPart* plan = nullptr;  // (slots)
  float* out = nullptr;         // (slots, heads, rows, columns), relative to the row's state
  RowState* states = nullptr;   // (slots, heads, rows)

  // base may be null to learn the size alone.
  KeySplit(const ForwardParams& p, KeyParts of, void* base)
      : batch(p.batch),
        parts(of.most),
        slots(of.planned > 0 ? of.planned : of.most * p.batch),
        columns(p.head_dim_v),
        shared{heads_sharing(p)},
        heads(p.num_heads / shared.heads),
        rows_of_head(p.seqlen_q * shared.heads) {
    const std::int64_t rows = std::int64_t{slots} * heads * rows_of_head;
    auto* next = static_cast<char*>(base);
    if (of.planned > 0) {
      plan = reinterpret_cast<PlannedPart*>(next);
      ends = reinterpret_cast<int*>(plan + slots);
      next += slots * sizeof(PlannedPart) + round_up(batch, 4) * sizeof(int);
    }
    out = reinterpret_cast<float*>(next);
    states = reinterpret_cast<RowState*>(out + rows * columns);
    size_ = static_cast<std::size_t>(reinterpret_cast<char*>(states + rows) - static_cast<char*>(base));
  }
  std::size_t size() const { return size_; }

  // One part has all keys of a query.
  FLASHSDK_HD bool has_one_part() const { return ends == nullptr && parts == 1; }
  // And all rows of a tile are of one head: what is of tiles without parts, too.
  FLASHSDK_HD bool writes_output() const { return has_one_part() && shared.heads == 1; }

  // What the thread block `index` of the grid's second dimension does; the first counts the tiles of `batch_of`, or,
  // with a plan, those of one sequence.
  FLASHSDK_HD KeyPart part(int index, int batch_of) const {
    if (ends == nullptr) return {batch_of, index, parts, slot(index, batch_of)};
    if (index >= ends[batch - 1]) return {0, 0, 0, 0};
    const PlannedPart own = plan[index];
    return {own.batch, own.index, own.parts, index};
  }
  // Of a sequence.
  FLASHSDK_HD int count(int batch_of) const {
    return ends == nullptr ? parts : ends[batch_of] - first_planned(batch_of);
  }
  FLASHSDK_HD int slot(int part, int batch_of) const {
    return ends == nullptr ? part * batch + batch_of : first_planned(batch_of) + part;
  }
  FLASHSDK_HD std::int64_t row(int slot, int head, int row_of_head) const {
    return (std::int64_t{slot} * heads + head) * rows_of_head + row_of_head;
  }

 private:
  FLASHSDK_HD int first_planned(int batch_of) const { return batch_of > 0 ? ends[batch_of - 1] : 0; }

  std::size_t size_ = 0;
};

}  // namespace flashsdk::sm80
