// The query tiles that see a tile of keys, over the query heads that share it: the column walk of the backward.
#pragma once

#include "common/mask_policy.h"
#include "common/turn_order.h"
#include "cuda/schedule/tile_scheduler.h"

namespace flashsdk::cuda {

template <int kBlockM, int kBlockN, class Policy, bool kStaggered>
class QueryStream {
 public:
  __device__ QueryStream(const ForwardParams& p, const SeqlenInfo& seq, const TileWork& work)
      : p_(p),
        seq_(seq),
        n_block_(work.block),
        batch_(work.batch),
        head_(work.head * p.heads_per_group() - 1),
        head_end_(head_ + 1 + p.heads_per_group()),
        walk_(TileWalk::runs(0, 0, 0, 0)) {
    if constexpr (kStaggered) {
      tiles_ = ceil_div(seq.seqlen_q, kBlockM);
      const int key_tiles = ceil_div(seq.seqlen_k, kBlockN);
      if (!p.deterministic && p.mask.kind == MaskKind::kDense)
        first_ = static_cast<int>(std::int64_t{n_block_} * tiles_ / key_tiles);
    }
  }

  struct Item {
    int head;
    TileRef tile;
  };
  __device__ bool next(Item& item) {
    while (!walk_.next(item.tile)) {
      if (++head_ == head_end_) return false;
      walk_ = Policy(p_.mask, seq_, batch_, head_).col_walk(Tile{kBlockM, kBlockN}, n_block_);
    }
    item.head = head_;
    if constexpr (kStaggered) {
      item.tile.index += first_;
      if (item.tile.index >= tiles_) item.tile.index -= tiles_;
    }
    return true;
  }
  // In a deterministic call, this key tile's turn at that tile of queries.
  __device__ int turn(const Item& item) const {
    const Policy policy(p_.mask, seq_, batch_, item.head);
    return turn_of(p_.mask, policy.row_walk(Tile{kBlockM, kBlockN}, item.tile.index), n_block_);
  }

 private:
  const ForwardParams& p_;
  const SeqlenInfo& seq_;
  int n_block_, batch_, head_, head_end_;
  TileWalk walk_;

  // Without a mask all key tiles would begin with query tile 0 and add to the same rows of dQ at once, so each begins
  // elsewhere (kStaggered, of a policy that is dense wherever the mask is); under a band they do anyway. In a
  // deterministic call they queue for those rows in order.
  int tiles_ = 0, first_ = 0;
};

}  // namespace flashsdk::cuda
