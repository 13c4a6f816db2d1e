// Which tiles of queries a persistent block works on, and in which order.
#pragma once

#include "cuda/tile_scheduler.h"

namespace flashsdk::sm90 {

// The tiles of a schedule, dealt to the blocks in rounds. With the longest first, the direction of dealing changes
// every round: who had the longest tile of one gets the shortest of the next.
class WorkStream {
 public:
  __device__ explicit WorkStream(const cuda::TileSchedule& schedule)
      : schedule_(schedule), count_(static_cast<int>(schedule.size())) {}

  __device__ bool next(cuda::TileWork& work) {
    const int position = round_ % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const int index = round_ * gridDim.x + position;
    if (index >= count_) return false;
    ++round_;
    work = schedule_.work(index);
    return true;
  }

 private:
  const cuda::TileSchedule& schedule_;
  int count_, round_ = 0;
};

}  // namespace flashsdk::sm90
