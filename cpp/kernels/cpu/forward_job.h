// What jobs of the forward have in common: queries of one head, the tiles that they visit, and their part of the keys.
#pragma once

#include "cpu/forward_tile.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class T, int kHeadDim, class Policy, bool kFeatures>
class ForwardJob : protected ForwardTile<T, kHeadDim, kFeatures> {
  static_assert(!kHasScore<Policy> || kFeatures, "where a policy's scores are asked for");

 protected:
  using Base = ForwardTile<T, kHeadDim, kFeatures>;
  using Tr = typename Base::Tr;
  using Base::p_;
  using Base::seqlen_;
  using Base::w_;
  using typename Base::Scratch;

  ForwardJob(const ForwardParams& p, Tile tile, int batch, int head, Scratch& scratch)
      : Base(p, batch, head, scratch), tile_(tile), policy_(p.mask, seqlen_, batch, head) {}

  // Queries and tiles of part `part` of a tile of queries; whether there are any.
  bool begin(int m_block, int part, const PartBuffers& buffers) {
    i0_ = m_block * tile_.m;
    i1_ = min_of(i0_ + tile_.m, seqlen_.seqlen_q);
    if (i0_ >= i1_) return false;  // a packed sequence shorter than the longest
    walk_ = policy_.row_walk(tile_, m_block);
    const TileRange tiles = tiles_of_sequence(walk_.has_runs());
    const int parts = num_parts(seqlen_.seqlen_q, keys_in(tiles));
    if (part >= parts) return false;
    const TileRange mine = part_of(tiles, part, parts);
    walk_ = walk_.between(mine.begin, mine.end);
    order_ = buffers.order(this->batch_, this->head_, m_block);
    if (parts > 1) this->joined_ = {part, parts, buffers.rows(this->batch_, seqlen_.offset_k, this->head_)};
    return true;
  }
  // Calls write() when its turn has come: what earlier parts came to is there.
  template <class F>
  void in_turn(F write) const {
    const auto& joined = this->joined_;
    if (joined.parts > 1) order_.wait_for_turn(joined.part);
    write();
    if (joined.parts > 1) order_.pass(joined.part);
  }

  const Tile tile_;
  const Policy policy_;
  int i0_ = 0, i1_ = 0;  // queries
  TileWalk walk_;

 private:
  // The tiles that queries of the sequence visit, without what a bias hides of them at either end. Of lists, and where
  // queries are too many for parts, all. A policy is asked for the tiles it is asked for elsewhere.
  TileRange tiles_of_sequence(bool runs) const {
    TileRange tiles{0, ceil_div(seqlen_.seqlen_k, tile_.n)};
    if (runs && seqlen_.seqlen_q <= kMostPartRows) {
      TileRange seen{tiles.end, 0};
      for (int m = 0; m * tile_.m < seqlen_.seqlen_q; ++m) {
        const TileWalk walk = policy_.row_walk(tile_, m);
        if (walk.begin() < walk.end()) seen = {min_of(seen.begin, walk.begin()), max_of(seen.end, walk.end())};
      }
      tiles = seen.begin < seen.end ? seen : TileRange{0, 0};
    }
    if constexpr (kFeatures) {
      const KeyRange shown = this->features_.keys_shown(seqlen_.seqlen_k);
      tiles.begin = max_of(tiles.begin, shown.begin / tile_.n);
      tiles.end = max_of(tiles.begin, min_of(tiles.end, ceil_div(shown.end, tile_.n)));
    }
    return tiles;
  }
  int keys_in(TileRange tiles) const { return min_of(tiles.end * tile_.n, seqlen_.seqlen_k) - tiles.begin * tile_.n; }

  PartOrder order_{nullptr};
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
