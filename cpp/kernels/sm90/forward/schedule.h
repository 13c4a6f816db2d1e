// Which tiles of queries a persistent block works on, and in which order.
#pragma once

#include "cuda/schedule/ragged_tiles.h"
#include "cuda/schedule/tile_scheduler.h"
#include "sm90/tickets.h"

namespace flashsdk::sm90 {

struct ForwardSchedule {
  cuda::TileSchedule tiles;
  NamedTickets tickets;  // none: tiles of equal cost, or one a block, dealt in turn
};

// One block's tiles, for a whole warp.
class WorkStream {
 public:
  __device__ WorkStream(const ForwardParams& p, const ForwardSchedule& schedule, int tile_rows)
      : schedule_(schedule), ragged_(p, tile_rows), is_ragged_(p.ragged_queries()) {
    if (schedule.tickets.any() && blockIdx.x == 0 && threadIdx.x % 32 == 0) schedule.tickets.set_up();
  }

  __device__ bool next(cuda::TileWork& work) {
    index_ = index_ < 0 ? blockIdx.x : !schedule_.tickets.any() ? index_ + gridDim.x : ticket();
    if (is_ragged_ ? find_ragged(work) : find(work)) return true;
    if (schedule_.tickets.any() && threadIdx.x % 32 == 0) schedule_.tickets.leave();
    return false;
  }
  // Once for each tile of queries, before next(): asks for the next one, when what is left of this one takes as long as
  // the answer. Sooner, a block might hold a long tile that another could begin.
  __device__ void draw() {
    if (!schedule_.tickets.any() || threadIdx.x % 32 != 0) return;
    drawn_ = schedule_.tickets.draw(drawn_ == 0);  // never 0: blocks begin with those of their index
  }

 private:
  __device__ bool find(cuda::TileWork& work) const {
    if (index_ >= schedule_.tiles.size()) return false;
    work = schedule_.tiles.work(index_);
    return true;
  }
  __device__ bool find_ragged(cuda::TileWork& work) {
    cuda::SequenceTile tile;
    if (!ragged_.find(index_, tile)) return false;
    const int heads = ragged_.heads();
    work = {tile.blocks - 1 - tile.index / heads, tile.index % heads, tile.batch};
    return true;
  }

  __device__ int ticket() const { return __shfl_sync(0xffffffffu, drawn_, 0); }

  const ForwardSchedule& schedule_;
  cuda::RaggedTiles<cuda::TilesOf::kQueries> ragged_;
  bool is_ragged_;
  int index_ = -1;
  int drawn_ = 0;  // of lane 0
};

}  // namespace flashsdk::sm90
