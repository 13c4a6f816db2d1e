// Which tiles of queries a persistent block works on, and in which order.
#pragma once

#include <cuda/atomic>

#include "cuda/schedule/ragged_tiles.h"
#include "cuda/schedule/tile_scheduler.h"

namespace flashsdk::sm90 {

// Hands out the tiles of one launch, where their cost differs: whoever is done first gets the next. It lies in the
// caller's workspace, which may hold anything at first: block 0 sets it up under the launch's own 64-bit name while the
// others work on their first tile, and the last one to leave takes the name away, for when a graph launches it again.
struct TicketCounter {
  unsigned long long owner;
  int next;  // tile
  int left;  // blocks that still draw
};

struct ForwardSchedule {
  cuda::TileSchedule tiles;
  TicketCounter* tickets;  // null: tiles of equal cost, or one a block, dealt in turn
  unsigned long long launch;
};

// One block's tiles, for a whole warp.
class WorkStream {
 public:
  __device__ WorkStream(const ForwardParams& p, const ForwardSchedule& schedule, int tile_rows)
      : schedule_(schedule), ragged_(p, tile_rows), is_ragged_(p.ragged_queries()) {
    if (schedule.tickets != nullptr && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      schedule.tickets->next = schedule.tickets->left = gridDim.x;
      owner().store(schedule.launch, ::cuda::memory_order_release);
    }
  }

  __device__ bool next(cuda::TileWork& work) {
    index_ = index_ < 0 ? blockIdx.x : schedule_.tickets == nullptr ? index_ + gridDim.x : ticket();
    if (is_ragged_ ? find_ragged(work) : find(work)) return true;
    if (schedule_.tickets != nullptr) leave();
    return false;
  }
  // Once for each tile of queries, before next(): asks for the next one, when what is left of this one takes as long as
  // the answer. Sooner, a block might hold a long tile that another could begin.
  __device__ void draw() {
    if (schedule_.tickets == nullptr || threadIdx.x % 32 != 0) return;
    if (drawn_ == 0) wait_for_owner();
    drawn_ = atomicAdd(&schedule_.tickets->next, 1);  // never 0: blocks begin with those of their index
  }

 private:
  using Owner = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;
  __device__ Owner owner() const { return Owner(schedule_.tickets->owner); }

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

  __device__ void wait_for_owner() const {
    while (owner().load(::cuda::memory_order_acquire) != schedule_.launch) {
    }
  }
  __device__ int ticket() const { return __shfl_sync(0xffffffffu, drawn_, 0); }
  __device__ void leave() const {
    if (threadIdx.x % 32 != 0) return;
    wait_for_owner();
    if (atomicSub(&schedule_.tickets->left, 1) == 1) owner().store(0, ::cuda::memory_order_relaxed);
  }

  const ForwardSchedule& schedule_;
  cuda::RaggedTiles<cuda::TilesOf::kQueries> ragged_;
  bool is_ragged_;
  int index_ = -1;
  int drawn_ = 0;  // of lane 0
};

}  // namespace flashsdk::sm90
