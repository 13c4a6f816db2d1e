// Few queries and many keys, as in decoding: the keys of a tile of queries are dealt to several thread blocks, of which
// there would else be too few for the device, and a second kernel joins what these have found (Flash-Decoding,
// https://pytorch.org/blog/flash-decoding/), or the last thread block to arrive (arrivals.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/mask_policy.h"
#include "common/params.h"
#include "common/seqlen_info.h"
#include "cuda/tile/vector_io.h"

namespace flashsdk::sm80 {

inline constexpr int kMostKeyParts = 128;
inline constexpr int kMostTiles = 1024;        // heads of all sequences that share tiles, but for few rows
inline constexpr int kMostSplitTiles = 65535;  // heads of all sequences: a dimension of the second kernel's grid
inline constexpr int kMostPlanned = 1024;      // sequences whose lengths a thread block keeps while it plans
inline constexpr int kFewRowsTile = 16;        // rows of a tile of few_rows_forward_kernel
inline constexpr int kFewRows = 64;            // that these kernels take of fp8 keys

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
// its own but its q. (With one query each, cpp/src/pack_heads.cpp has made rows of the heads before.) Output that goes
// through the workspace many rows of few keys would not pay for.
inline int heads_sharing(const ForwardParams& p) {
  constexpr int kManyKeys = 512;
  // Of wide heads there may be 128 of one head of keys (MLA), which each would read for itself.
  const int most_rows = is_wide(p) ? kMostWideRows : 128, keys_of_row = is_wide(p) ? 1 : 16;
  const int group = p.heads_per_group();
  const std::int64_t rows = std::int64_t{p.seqlen_q} * group;
  const bool alike = p.mask.kind != MaskKind::kBlockSparse && p.mask.user == nullptr &&
                     missing(Features::kSoftcap, p.score.features()) == Features::kNone && (!p.fp8_kv() || can_join(p));
  const std::int64_t tiles = std::int64_t{p.batch} * p.num_heads_kv;
  const bool few_rows = p.fp8_kv() || (rows <= kFewRowsTile && !is_wide(p));  // see has_few_rows()
  const int most_tiles = few_rows ? kMostSplitTiles : kMostTiles;
  const bool few = group > 1 && rows > 0 && rows <= most_rows && p.seqlen_k >= kManyKeys &&
                   p.seqlen_k >= keys_of_row * rows && tiles > 0 && tiles <= most_tiles;
  return alike && few ? group : 1;
}

// Where parts of the keys run.
inline constexpr int kUsualMemoryRate = 3350;  // an H100's
struct SplitDevice {
  int multiprocessors, blocks_each;    // thread blocks of the kernel that a multiprocessor holds
  int memory_rate = kUsualMemoryRate;  // GB/s, by the clock and the width of its memory

  FLASHSDK_HD int slots() const { return multiprocessors * blocks_each; }
};

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
inline int key_parts(std::int64_t query_tiles, int keys, int tile, const SplitDevice& device,
                     float others_key = kOthersKey) {
  const bool alone = others_key == kNoOthers;
  if (query_tiles == 0 || (!alone && 2 * query_tiles > device.multiprocessors)) return 1;
  const int key_tiles = ceil_div(keys, tile);
  int best = 1;
  auto least = alone ? INT64_MAX : static_cast<std::int64_t>(others_key * static_cast<float>(keys));
  for (int parts = alone ? 1 : 2; parts <= min_of(key_tiles, kMostKeyParts); ++parts) {
    const std::int64_t blocks = query_tiles * parts;
    if (blocks > device.slots()) break;
    const int each = blocks > device.multiprocessors ? PartCosts::kSharedTile : PartCosts::kTile;
    const std::int64_t time =
        std::int64_t{each} * ceil_div(key_tiles, parts) + PartCosts::kJoin + PartCosts::kJoinPart * parts;
    if (time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

// Calls of few rows a head are taken split or not, of nearly any number of heads: a tile of rows, where there are many
// keys. Of fp8 keys and values four tiles, which take about as long as one of 128 rows that has to convert for each
// warp, and of few keys, too: no other kernel converts a key once.
inline bool has_few_rows(const ForwardParams& p, int sharing) {
  constexpr int kManyKeys = 512;
  const std::int64_t tiles = std::int64_t{p.num_heads / sharing} * p.batch, rows = std::int64_t{p.seqlen_q} * sharing;
  const bool few = p.fp8_kv() ? rows <= kFewRows : rows <= kFewRowsTile && p.seqlen_k >= kManyKeys;
  return few && rows > 0 && tiles > 0 && tiles <= kMostSplitTiles;
}
// What calls of few rows take, in units of PartCosts, fitted to an H100's times of fp8
// (benchmarks/results/sm80_few_rows.csv) and an H200's of 16 bits (sm80_few_rows_16_bits.csv). A tile of keys and
// values is 32 KB. A thread block alone on a multiprocessor waits for answers of memory and of its own instructions.
// Nearly as many as there are multiprocessors ask for all that memory gives.
struct FewRowsCosts {
  static constexpr float kTile = 34.f, kStart = 30.f, kJoin = 70.f, kJoinPart = 1.f;
  // Of the time of the last turn, where some multiprocessors have twice the thread blocks of others.
  static constexpr float kUneven = 0.1f;

  SplitDevice device;
  float tile_of_memory;  // until each multiprocessor has got a tile

  explicit FewRowsCosts(const SplitDevice& on)
      : device(on),
        tile_of_memory(32.f * 32.768f * static_cast<float>(on.multiprocessors) /
                       (0.9f * static_cast<float>(on.memory_rate))) {}

  // Thread blocks, the tiles of all, and of the longest. They start as others end: the last to start have a turn of
  // their own, which is short for memory where they are few. Multiples of `evenly` are dealt out evenly: of all slots,
  // where others start beside them that have nothing to do.
  FLASHSDK_HD float time(float blocks, float tiles, int longest, int evenly) const {
    const float slots = static_cast<float>(device.slots()),
                multiprocessors = static_cast<float>(device.multiprocessors);
    const float before = static_cast<float>(ceil_div(static_cast<int>(blocks), device.slots()) - 1) * slots;
    const float in_last = blocks - before, mean = tiles / blocks, last = static_cast<float>(longest);
    const float memory = tile_of_memory * tiles / multiprocessors, of_last = memory * in_last / blocks;
    const float most = static_cast<float>(round_up(static_cast<int>(in_last), evenly));
    const float unequal = kTile * (last - mean) / 2, alone = kTile * last - of_last;
    return memory + (unequal > alone ? unequal : alone) + kUneven * of_last * (most / in_last - 1) +
           kStart * blocks / slots;
  }
};
// Into how many parts their keys are split. 1: there is no second kernel.
inline int few_rows_parts(const FewRowsCosts& costs, std::int64_t query_tiles, int keys, int tile) {
  const int key_tiles = max_of(1, ceil_div(keys, tile));
  const float heads = static_cast<float>(query_tiles), tiles = heads * static_cast<float>(key_tiles);
  int best = 1;
  float least = 0;
  for (int parts = 1; parts <= min_of(key_tiles, kMostKeyParts); ++parts) {
    const float count = static_cast<float>(parts);
    const float joins = parts > 1 ? FewRowsCosts::kJoin + FewRowsCosts::kJoinPart * count : 0.f;
    const float time =
        costs.time(heads * count, tiles, ceil_div(key_tiles, parts), costs.device.multiprocessors) + joins;
    if (parts == 1 || time < least) {
      least = time;
      best = parts;
    }
  }
  return best;
}

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
// Into how many parts these are split: without a second kernel, where one part is all. Where not all thread blocks run
// at once, what counts is the last ones to start, and that each has to wait for its first keys.
inline int fp8_key_parts(const Fp8Costs& costs, std::int64_t query_tiles, int keys, int tile,
                         const SplitDevice& device) {
  const int key_tiles = ceil_div(keys, tile);
  const std::int64_t slots = device.slots();
  int best = 1;
  std::int64_t least = 0;
  for (int parts = 1; parts <= max_of(1, min_of(key_tiles, kMostKeyParts)); ++parts) {
    const std::int64_t blocks = query_tiles * parts;
    const int tile_cost = costs.tile(static_cast<int>(min_of(blocks, slots)), device.multiprocessors);
    const std::int64_t each = std::int64_t{tile_cost} * ceil_div(key_tiles, parts) + costs.start;
    const std::int64_t joins = parts > 1 ? costs.join + std::int64_t{costs.join_part} * parts : 0;
    const std::int64_t time = (blocks + slots - 1) / slots * each + joins;
    if (parts == 1 || time < least - least * Fp8Costs::kLeastGain / 100) {
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
  int arrivals = 0;  // tiles of planned few rows: of each the last thread block joins what all have found (arrivals.h)
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
         p.batch > 1 && p.batch <= kMostPlanned && p.seqlen_q > 0 && rows <= most_rows &&
         visible_keys(p, tile) >= kManyKeys && tiles > 0 && tiles <= std::int64_t{kManyTiles} * multiprocessors;
}

// Tiles of queries that a sequence of one head of tiles has.
inline int tiles_of_head(const ForwardParams& p, int sharing, Tile tile) {
  return ceil_div(p.seqlen_q * sharing, tile.m);
}

// sharing: heads_sharing().
inline KeyParts key_parts(const ForwardParams& p, int sharing, Tile tile, const SplitDevice& device,
                          float others_key = kOthersKey) {
  const int heads = p.num_heads / sharing, slots = device.slots();
  const bool few_rows = tile.m == kFewRowsTile;
  const std::int64_t query_tiles = std::int64_t{tiles_of_head(p, sharing, tile)} * heads * p.batch;
  if (plans_parts(p, sharing, tile, device.multiprocessors)) {
    constexpr int kLongest = 8;  // parts for each place where a thread block runs
    constexpr int kAll = 2;      // the same. Thread blocks that get none still have to start
    const int tiles = heads * tiles_of_head(p, sharing, tile);
    return {max_of(4, min_of(ceil_div(kLongest * slots, tiles * p.batch), kMostKeyParts)),
            p.batch + ceil_div(kAll * slots, tiles), few_rows ? static_cast<int>(query_tiles) : 0};
  }
  const int keys = visible_keys(p, tile);
  const bool is_full = query_tiles >= slots || std::int64_t{heads} * p.batch > kMostSplitTiles;
  const auto of_fp8 = [&] {
    return is_full
               ? 1
               : fp8_key_parts(Fp8Costs(query_tiles * tile.m, p.head_dim, tile.n), query_tiles, keys, tile.n, device);
  };
  const int parts = few_rows     ? few_rows_parts(FewRowsCosts(device), query_tiles, keys, tile.n)
                    : p.fp8_kv() ? of_fp8()
                                 : key_parts(query_tiles, keys, tile.n, device, others_key);
  return {p.num_splits > 0 ? min_of(parts, p.num_splits) : parts};
}

// What a plan would take: `blocks` thread blocks for `tiles` of keys, the longest with `longest` of these. Those that
// do not all run at once end within half of the longest of each other.
FLASHSDK_HD float planned_time(float blocks, float tiles, int longest, const SplitDevice& device) {
  const float slots = static_cast<float>(device.slots()), last = static_cast<float>(longest);
  const bool shares = blocks > static_cast<float>(device.multiprocessors);
  const auto each = static_cast<float>(shares ? PartCosts::kSharedTile : PartCosts::kTile);
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

// How many thread blocks of a tile have not left what they have found (arrivals.h). In memory that may hold anything at
// first.
struct ArrivalCounter {
  unsigned long long owner;
  int left;
};

// What planning asks of a call and its device.
struct PlanProblem {
  int tile_keys = 1, most_keys = 0;  // of a tile; that a query sees
  int tiles_of_head = 1;             // of queries
  bool few_rows = false;
  SplitDevice device{1, 1};
  FewRowsCosts few_rows_costs{SplitDevice{1, 1}};

  FLASHSDK_HD float time(float blocks, float tiles, int longest) const {
    return few_rows ? few_rows_costs.time(blocks, tiles, longest, device.slots())
                    : planned_time(blocks, tiles, longest, device);
  }
  // Without a query nobody reads the keys.
  FLASHSDK_HD int tiles_of(const ForwardParams& p, int batch) const {
    const SeqlenInfo seq(p, batch);
    return seq.seqlen_q > 0 ? ceil_div(min_of(seq.seqlen_k, most_keys), tile_keys) : 0;
  }
};

// What a thread block learns of its part.
struct KeyPart {
  int batch, index, parts;  // which of how many; parts: 0 where there is nothing to do
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
  int heads, rows_of_head;  // of tiles; of packed sequences as many as the longest may have
  bool planned;
  PlanProblem plan;
  // Of tiles whose last thread block joins what all have found: (tiles of a head, heads, batch), and the launch's name.
  ArrivalCounter* arrivals = nullptr;
  unsigned long long launch = 0;
  int* ends = nullptr;         // (batch): slots of the sequences so far, for a kernel that joins planned parts
  float* out = nullptr;        // (slots, heads, rows, columns), relative to the row's state
  RowState* states = nullptr;  // (slots, heads, rows)

  // base may be null to learn the size alone.
  KeySplit(const ForwardParams& p, KeyParts of, void* base)
      : batch(p.batch),
        parts(of.most),
        slots(of.planned > 0 ? of.planned : of.most * p.batch),
        columns(p.head_dim_v),
        shared{heads_sharing(p)},
        heads(p.num_heads / shared.heads),
        rows_of_head(p.seqlen_q * shared.heads),
        planned(of.planned > 0) {
    const std::int64_t rows = std::int64_t{slots} * heads * rows_of_head;
    auto* next = static_cast<char*>(base);
    if (of.arrivals > 0) {
      arrivals = reinterpret_cast<ArrivalCounter*>(next);
      next += of.arrivals * sizeof(ArrivalCounter);
    } else if (planned) {
      ends = reinterpret_cast<int*>(next);
      next += round_up(batch, 4) * sizeof(int);
    }
    out = reinterpret_cast<float*>(next);
    states = reinterpret_cast<RowState*>(out + rows * columns);
    size_ = static_cast<std::size_t>(reinterpret_cast<char*>(states + rows) - static_cast<char*>(base));
  }
  std::size_t size() const { return size_; }

  // One part has all keys of a query.
  FLASHSDK_HD bool has_one_part() const { return !planned && parts == 1; }
  // And all rows of a tile are of one head: what is of tiles without parts, too.
  FLASHSDK_HD bool writes_output() const { return has_one_part() && shared.heads == 1; }

  // What the thread block `index` of the grid's second dimension does; the first counts the tiles of `batch_of`. With a
  // plan it is planned_part() that says so, and the first counts the tiles of one sequence.
  FLASHSDK_HD KeyPart part(int index, int batch_of) const { return {batch_of, index, parts, slot(index, batch_of)}; }
  // Of a sequence, in the kernel that joins.
  FLASHSDK_HD int count(int batch_of) const { return planned ? ends[batch_of] - first_planned(batch_of) : parts; }
  FLASHSDK_HD int slot(int part, int batch_of) const {
    return planned ? first_planned(batch_of) + part : part * batch + batch_of;
  }
  // Of another part of the same sequence.
  FLASHSDK_HD int slot_beside(const KeyPart& of, int part) const {
    return planned ? of.slot - of.index + part : slot(part, of.batch);
  }
  FLASHSDK_HD std::int64_t row(int slot, int head, int row_of_head) const {
    return (std::int64_t{slot} * heads + head) * rows_of_head + row_of_head;
  }

 private:
  FLASHSDK_HD int first_planned(int batch_of) const { return batch_of > 0 ? ends[batch_of - 1] : 0; }

  std::size_t size_ = 0;
};

}  // namespace flashsdk::sm80
