// Which tiles of queries a persistent block works on, and in which order.
#pragma once

#include <cuda/atomic>

#include "cuda/tile_scheduler.h"

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
  TicketCounter* tickets;  // null: tiles of equal cost, dealt in turn
  unsigned long long launch;
};

// One block's tiles, for a whole warp.
class WorkStream {
 public:
  __device__ explicit WorkStream(const ForwardSchedule& schedule)
      : schedule_(schedule), leader_(threadIdx.x % 32 == 0), index_(static_cast<int>(blockIdx.x) - kNotYet) {
    if (schedule.tickets != nullptr && blockIdx.x == 0 && leader_) {
      schedule.tickets->next = schedule.tickets->left = gridDim.x;
      owner().store(schedule.launch, ::cuda::memory_order_release);
    }
  }

  __device__ bool next(cuda::TileWork& work) {
    if (index_ < 0) {
      index_ += kNotYet;
    } else if (schedule_.tickets == nullptr) {
      index_ += gridDim.x;
    } else {
      index_ = draw();
    }
    if (index_ >= schedule_.tiles.size()) return false;
    work = schedule_.tiles.work(index_);
    return true;
  }

 private:
  using Owner = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;
  __device__ Owner owner() const { return Owner(schedule_.tickets->owner); }

  __device__ int draw() const {
    int index = 0;
    if (leader_) {
      while (owner().load(::cuda::memory_order_acquire) != schedule_.launch) {
      }
      index = atomicAdd(&schedule_.tickets->next, 1);
      if (index >= schedule_.tiles.size() && atomicSub(&schedule_.tickets->left, 1) == 1) {
        owner().store(0, ::cuda::memory_order_relaxed);
      }
    }
    return __shfl_sync(0xffffffffu, index, 0);
  }

  static constexpr int kNotYet = 1 << 30;  // below any tile
  const ForwardSchedule& schedule_;
  bool leader_;
  int index_;
};

}  // namespace flashsdk::sm90
