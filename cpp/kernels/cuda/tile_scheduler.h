// Which tile a thread block works on. Blocks start in the order of their index, so the order is the schedule.
#pragma once

#include "common/params.h"
#include "common/turn_order.h"

namespace flashsdk::cuda {

struct TileWork {
  int block, head, batch;
};

// The tiles of one head next to each other, or, in sections of several heads, the same tile of each head: with the
// longest tiles first, the last ones to finish are then short in all heads. A section's K and V should stay in L2.
struct TileSchedule {
  int num_blocks;  // tiles of one head
  int num_heads;
  int heads_total;  // num_heads · batch
  int section;      // heads walked side by side
  bool descending;  // last tile first

  FLASHSDK_HD std::int64_t size() const { return std::int64_t{num_blocks} * heads_total; }

  FLASHSDK_HD TileWork work(int index) const {
    int section_tiles = section * num_blocks;
    int first_head = index / section_tiles * section;
    int rest = index % section_tiles;
    int width = min_of(section, heads_total - first_head);
    int block = rest / width;
    int head = first_head + rest % width;
    return {descending ? num_blocks - 1 - block : block, head % num_heads, head / num_heads};
  }

  // Of one packed sequence alone, whose heads have so many tiles.
  FLASHSDK_HD TileSchedule of_sequence(int blocks) const {
    return {blocks, num_heads, num_heads, min_of(section, num_heads), descending};
  }
};

// Heads whose operands of bytes_per_head stay in L2 together.
inline constexpr std::int64_t kL2Share = 16 << 20;  // of 40 MiB (A100) to 60 MB (H200)
inline int section_of(std::int64_t bytes_per_head, int heads_total, bool uniform_tiles,
                      std::int64_t l2_share = kL2Share) {
  if (uniform_tiles || heads_total == 0) return 1;
  std::int64_t fit = l2_share / (bytes_per_head > 0 ? bytes_per_head : 1);
  return static_cast<int>(fit < 1 ? 1 : fit > heads_total ? heads_total : fit);
}

// The tiles of queries, whose heads share K and V in L2.
inline TileSchedule forward_schedule(const ForwardParams& p, int tile_queries, std::size_t element_bytes,
                                     bool uniform_tiles) {
  const int heads_total = p.num_heads * p.batch;
  const std::int64_t kv_bytes =
      std::int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * element_bytes / p.heads_per_group();
  return {ceil_div(p.seqlen_q, tile_queries), p.num_heads, heads_total,
          section_of(kv_bytes, heads_total, uniform_tiles), true};
}

// The tiles of keys, whose heads share Q, dO and the fp32 dQ in L2. Under a band multiprocessors are idle at the end
// of the last section, so a section has kTilesEach tiles for each of them; but only as many heads as leave kKeysAtOnce
// keys of each at work at a time, as otherwise all key tiles read Q and dO anew. Key tiles of a layout share too
// little of these for that. In a deterministic call key tiles of a head take turns (turn_order.h): of twice as many
// heads fewer blocks queue for the same dQ, and more are slower again. Measurements: docs/sm90-backward.md, version
// 10.
inline TileSchedule backward_schedule(const ForwardParams& p, int tile_keys, std::size_t element_bytes,
                                      int multiprocessors) {
  constexpr int kTilesEach = 8, kKeysAtOnce = 512;
  const int heads_total = p.num_heads_kv * p.batch;
  const std::int64_t q_bytes = std::int64_t{p.seqlen_q} * p.heads_per_group() *
                               ((p.head_dim + p.head_dim_v) * element_bytes + p.head_dim * sizeof(float));
  TileSchedule schedule{ceil_div(p.seqlen_k, tile_keys), p.num_heads_kv, heads_total, 0, false};
  if (p.deterministic) {
    schedule.section = section_of(q_bytes, heads_total, false, 2 * kL2Share);
    schedule.descending = last_keys_first(p.mask);
    return schedule;
  }
  schedule.section = section_of(q_bytes, heads_total, p.mask.kind == MaskKind::kDense);
  if (p.mask.kind == MaskKind::kBand) {
    const int enough = ceil_div(kTilesEach * multiprocessors, max_of(1, schedule.num_blocks));
    const int most = multiprocessors * tile_keys / kKeysAtOnce;
    schedule.section = max_of(schedule.section, min_of(enough, most));
  }
  return schedule;
}

}  // namespace flashsdk::cuda
