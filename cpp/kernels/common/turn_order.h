// The order in which key tiles add to a tile of queries of dQ, where it is fixed (deterministic calls).
//
// A tile of queries counts its turns, and whoever adds to it waits for its own. Thread blocks take key tiles off a
// schedule (cuda/schedule/tile_scheduler.h), and turns are in the order of that, so that a thread block waits only for
// work that was taken earlier: the earliest that is not done waits for nothing, and all end, however few blocks run and
// in whatever order they walk. The rest is about speed. All walk queries in ascending order, so under a band key tiles
// that begin together never meet if the last keys have the first turn: tile n is where n + 1 was a step ago.
#pragma once

#include "common/params.h"
#include "common/tile_walk.h"

namespace flashsdk {

// The order of key tiles in the schedule and at each tile of queries: from the last to the first, or the other way.
FLASHSDK_HD bool last_keys_first(const MaskParam& mask) { return mask.kind == MaskKind::kBand; }

// The turn of key tile n_block, from 0, at the tile of queries that has this row walk, on which it is.
FLASHSDK_HD int turn_of(const MaskParam& mask, const TileWalk& row, int n_block) {
  const int before = row.rank_of(n_block);
  return last_keys_first(mask) ? row.count() - 1 - before : before;
}

}  // namespace flashsdk
