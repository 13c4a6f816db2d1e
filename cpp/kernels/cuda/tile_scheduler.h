// Which tile a thread block works on. Blocks start in the order of their index, so the order is the schedule.
#pragma once

#include "common/packed_tiles.h"
#include "common/params.h"
#include "common/turn_order.h"

namespace flashsdk::cuda {

struct TileWork {
  int block, head, batch;
};

// The tiles of one head next to each other, or, in sections of several heads, the same tile of each head: with the
// longest tiles first, the last ones to finish are then short in all heads. A section's K and V should stay in L2.
struct TileSchedule {
  int num_blocks;  // tiles of one head, of all packed sequences
  int num_heads;
  int heads_total;  // num_heads · batch, or num_heads if packed
  int section;      // heads walked side by side
  bool descending;  // last tile first

  // Packed sequences; else null.
  const std::int32_t* cu_seqlens;
  int batch, tile_rows;

  FLASHSDK_HD std::int64_t size() const { return std::int64_t{num_blocks} * heads_total; }

  FLASHSDK_HD TileWork work(int index) const {
    int section_tiles = section * num_blocks;
    int first_head = index / section_tiles * section;
    int rest = index % section_tiles;
    int width = min_of(section, heads_total - first_head);
    int block = rest / width;
    int head = first_head + rest % width;
    if (descending) block = num_blocks - 1 - block;
    if (cu_seqlens == nullptr) return {block, head % num_heads, head / num_heads};
    const int sequence = sequence_at(cu_seqlens, batch, tile_rows, block);
    return {block - static_cast<int>(first_packed_tile(cu_seqlens[sequence], tile_rows, sequence)), head, sequence};
  }
};

// Of sequences of at most `seqlen` rows, `total` rows together; cu_seqlens is null where they are not packed.
inline TileSchedule tile_schedule(const std::int32_t* cu_seqlens, int seqlen, std::int64_t total, int batch,
                                  int num_heads, int tile_rows) {
  TileSchedule schedule{
      ceil_div(seqlen, tile_rows), num_heads, num_heads * batch, 1, false, cu_seqlens, batch, tile_rows};
  if (cu_seqlens != nullptr) {
    schedule.num_blocks = seqlen == 0 ? 0 : static_cast<int>(first_packed_tile(total, tile_rows, batch));
    schedule.heads_total = batch == 0 ? 0 : num_heads;
  }
  return schedule;
}

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
  TileSchedule schedule = tile_schedule(p.cu_seqlens_q, p.seqlen_q, p.total_q, p.batch, p.num_heads, tile_queries);
  const std::int64_t kv_bytes =
      std::int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * element_bytes / p.heads_per_group();
  schedule.section = section_of(kv_bytes, schedule.heads_total, uniform_tiles);
  schedule.descending = true;
  return schedule;
}

// The tiles of keys, whose heads share Q, dO and the fp32 dQ in L2. In a deterministic call key tiles of a head take
// turns (turn_order.h): the more heads side by side, the fewer blocks queue for the same dQ.
inline TileSchedule backward_schedule(const ForwardParams& p, int tile_keys, std::size_t element_bytes) {
  TileSchedule schedule = tile_schedule(p.cu_seqlens_k, p.seqlen_k, p.total_k, p.batch, p.num_heads_kv, tile_keys);
  const std::int64_t q_bytes = std::int64_t{p.seqlen_q} * p.heads_per_group() *
                               ((p.head_dim + p.head_dim_v) * element_bytes + p.head_dim * sizeof(float));
  if (p.deterministic) {
    schedule.section = section_of(q_bytes, schedule.heads_total, false, 2 * kL2Share);
    schedule.descending = last_keys_first(p.mask);
  } else {
    schedule.section = section_of(q_bytes, schedule.heads_total, p.mask.kind == MaskKind::kDense);
  }
  return schedule;
}

}  // namespace flashsdk::cuda
