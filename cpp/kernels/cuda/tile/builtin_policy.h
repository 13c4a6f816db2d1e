// Every built-in mask in one policy, told apart at run time.
//
// Where one warp walks the tiles for a whole thread block, which mask it is costs nothing to ask there, and the others
// only ever need to know which keys of a partial tile a query sees: a band for all of them. One kernel then serves all
// masks.
#pragma once

#include <type_traits>

#include "common/mask_policy.h"

namespace flashsdk::cuda {

class BuiltinPolicy {
 public:
  __device__ BuiltinPolicy(const MaskParam& mask, const SeqlenInfo& s, int batch, int head)
      : mask_(mask), seq_(s), batch_(batch), head_(head) {}

  // visit(walk, is_band) with the walk of a row of tiles. m0: its first query, which is m_block · tile.m unless
  // kFromEnd, where tiles are counted from the end of a sequence: layouts have no walk from there, as a tile may lie in
  // several blocks, and refuse_forward() keeps them away. Each kind by itself, as the compiler knows it: it then keeps
  // in registers what the one or the other needs, not both.
  template <bool kFromEnd, class Visit>
  __device__ void visit_row_walk(flashsdk::Tile tile, int m_block, int m0, Visit&& visit) const {
    if (!kFromEnd && mask_.kind == MaskKind::kBlockSparse) {
      visit(BlockSparsePolicy(mask_, seq_, batch_, head_).row_walk(tile, m_block), std::false_type());
    } else if (mask_.kind == MaskKind::kBand) {
      visit(BandPolicy(mask_, seq_, batch_, head_).row_walk_from(tile, m0), std::true_type());
    } else {
      visit(DensePolicy(mask_, seq_, batch_, head_).row_walk(tile, m_block), std::false_type());
    }
  }
  __device__ TileWalk row_walk(flashsdk::Tile tile, int m_block) const {
    switch (mask_.kind) {
      case MaskKind::kDense:
        return DensePolicy(mask_, seq_, batch_, head_).row_walk(tile, m_block);
      case MaskKind::kBand:
        return BandPolicy(mask_, seq_, batch_, head_).row_walk(tile, m_block);
      default:
        return BlockSparsePolicy(mask_, seq_, batch_, head_).row_walk(tile, m_block);
    }
  }
  __device__ TileWalk col_walk(flashsdk::Tile tile, int n_block) const {
    switch (mask_.kind) {
      case MaskKind::kDense:
        return DensePolicy(mask_, seq_, batch_, head_).col_walk(tile, n_block);
      case MaskKind::kBand:
        return BandPolicy(mask_, seq_, batch_, head_).col_walk(tile, n_block);
      default:
        return BlockSparsePolicy(mask_, seq_, batch_, head_).col_walk(tile, n_block);
    }
  }
  // Asked in partial tiles only, which a dense mask does not have.
  __device__ bool allowed(int i, int j) const { return BandPolicy(mask_, seq_, batch_, head_).allowed(i, j); }
  __device__ KeyRange keys_of(int i) const { return BandPolicy(mask_, seq_, batch_, head_).keys_of(i); }
  __device__ KeyRange diagonals() const { return BandPolicy(mask_, seq_, batch_, head_).diagonals(); }

 private:
  const MaskParam& mask_;
  const SeqlenInfo& seq_;
  int batch_, head_;
};

// Of partial tiles, where a policy knows them.
template <class Policy>
__device__ KeyRange diagonals_of(const Policy& policy) {
  if constexpr (kHasDiagonals<Policy>) return policy.diagonals();
  return {0, 0};
}

// BuiltinPolicy's, or the row walk of a user's policy.
template <bool kFromEnd, class Policy, class Visit>
__device__ void visit_row_walk(const Policy& policy, flashsdk::Tile tile, int m_block, int m0, Visit&& visit) {
  if constexpr (std::is_base_of_v<BuiltinPolicy, Policy>) {
    policy.template visit_row_walk<kFromEnd>(tile, m_block, m0, visit);
  } else {
    static_assert(!kFromEnd, "a policy of one's own has no walk for tiles that are counted from a sequence's end");
    visit(policy.row_walk(tile, m_block), std::false_type());
  }
}

}  // namespace flashsdk::cuda
