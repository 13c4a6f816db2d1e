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
    if (num_blocks == 1) return work_at(0, index);  // of few queries, whom divisions would cost a hundredth of a call
    int section_tiles = section * num_blocks;
    int first_head = index / section_tiles * section;
    int rest = index % section_tiles;
    int width = min_of(section, heads_total - first_head);
    return work_at(rest / width, first_head + rest % width);
  }
  // The tile that comes as number `block` in its head, of all heads.
  FLASHSDK_HD TileWork work_at(int block, int head) const {
    return {descending ? num_blocks - 1 - block : block, head % num_heads, head / num_heads};
  }

  // Of one packed sequence alone, whose heads have so many tiles.
  FLASHSDK_HD TileSchedule of_sequence(int blocks) const {
    return {blocks, num_heads, num_heads, min_of(section, num_heads), descending};
  }
};

// How wide a section is: heads whose operands, of bytes_per_head, stay in L2 together. uniform_tiles: all tiles take
// equally long, as without a mask. Nothing is gained there by mixing heads, so that a section is one.
inline int section_of(std::int64_t bytes_per_head, int heads_total, bool uniform_tiles, std::int64_t l2_share) {
  if (uniform_tiles || heads_total == 0) return 1;
  std::int64_t fit = l2_share / (bytes_per_head > 0 ? bytes_per_head : 1);
  return static_cast<int>(fit < 1 ? 1 : fit > heads_total ? heads_total : fit);
}

// The tiles of queries, whose heads share K and V in L2. They descend: under a causal mask the last is the longest.
inline TileSchedule forward_schedule(const ForwardParams& p, int tile_queries, std::size_t element_bytes,
                                     bool uniform_tiles) {
  constexpr std::int64_t kL2Share = 16 << 20;  // of 40 MiB (A100) to 60 MB (H200)
  const int heads_total = p.num_heads * p.batch;
  const std::int64_t kv_bytes =
      std::int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * element_bytes / p.heads_per_group();
  return {ceil_div(p.seqlen_q, tile_queries), p.num_heads, heads_total,
          section_of(kv_bytes, heads_total, uniform_tiles, kL2Share), true};
}

// The tiles of keys: sections of the same width, and a last one that is wider.
struct BackwardSchedule {
  TileSchedule sections;  // of all heads but those of the last
  int last_width;         // heads of the last

  FLASHSDK_HD std::int64_t size() const { return sections.size() + std::int64_t{sections.num_blocks} * last_width; }

  FLASHSDK_HD TileWork work(int index) const {
    const int rest = index - static_cast<int>(sections.size());
    if (rest < 0) return sections.work(index);
    return sections.work_at(rest / last_width, sections.heads_total + rest % last_width);
  }

  // Of one packed sequence alone, whose heads have so many tiles.
  FLASHSDK_HD TileSchedule of_sequence(int blocks) const { return sections.of_sequence(blocks); }
};

// What the schedule has to know of the device: how much its L2 holds, and how many thread blocks, or clusters, work at
// a time.
struct Workers {
  std::int64_t l2_bytes;
  int count;
};

// Every key tile of a head reads its Q and dO and adds to its fp32 dQ. With more heads side by side than L2 holds these
// of, memory is read and written anew for each tile: five times as much at head_dim 256 (docs/dev/sm90-backward.md,
// "Bytes"). Heads of a group count once, as their tiles are walked one head after another. By the kind of call:
//   no mask         one head: its tiles are equally long
//   band            what two thirds of L2 hold; longest tiles first. At the end of the last section workers are idle
//                   unless it has kTilesEach tiles for each: it may hold twice as much, where a head has enough key
//                   tiles to use often what is read once
//   layout          what a third holds: its key tiles share less of what they read
//   deterministic   whatever the mask, two thirds: key tiles of a head take turns (turn_order.h), and of more heads
//                   fewer queue for one dQ
inline BackwardSchedule backward_schedule(const ForwardParams& p, int tile_keys, std::size_t element_bytes,
                                          Workers workers) {
  constexpr int kTilesEach = 4, kUsedOften = 16;
  const int heads_total = p.num_heads_kv * p.batch, num_blocks = ceil_div(p.seqlen_k, tile_keys);
  const std::int64_t bytes_per_head =
      std::int64_t{p.seqlen_q} * ((p.head_dim + p.head_dim_v) * element_bytes + p.head_dim * sizeof(float));
  const bool in_turns = p.deterministic, longest_first = p.mask.kind == MaskKind::kBand && !in_turns;
  const bool uniform = p.mask.kind == MaskKind::kDense && !in_turns;
  const std::int64_t third = workers.l2_bytes / 3, share = longest_first || in_turns ? 2 * third : third;
  const int section = section_of(bytes_per_head, heads_total, uniform, share);
  int last = section;
  if (longest_first && num_blocks >= kUsedOften) {
    const int enough = ceil_div(kTilesEach * workers.count, num_blocks);
    last = max_of(section, min_of(enough, section_of(bytes_per_head, heads_total, false, 2 * share)));
  }
  last = min_of(last, heads_total);
  return {{num_blocks, p.num_heads_kv, heads_total - last, section, in_turns && last_keys_first(p.mask)}, last};
}

}  // namespace flashsdk::cuda
