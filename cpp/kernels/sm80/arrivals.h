// Which thread block is the last of several that each have a part of a result, and joins what all have found: without a
// kernel after theirs, and without one before it that clears counters.
#pragma once

#include <cuda/atomic>

#include "sm80/key_split.h"

namespace flashsdk::sm80 {

// The first thread block of a result sets its counter up under the launch's own 64-bit name, and the last to arrive
// takes the name away, for when a graph launches it again. A thread block waits for one of a lower index alone. GPUs
// start them in the order of their index, though CUDA's guide does not promise it: so that one has started.
class Arrivals {
 public:
  __device__ Arrivals(ArrivalCounter* counter, unsigned long long launch) : counter_(counter), launch_(launch) {}

  // One thread of the first thread block, before all else.
  __device__ void set_up(int count) const {
    counter_->left = count;
    owner().store(launch_, ::cuda::memory_order_release);
  }
  // All threads of a thread block, which has written its part: whether all others have, too. Then what they have
  // written can be read, but not by way of L1.
  __device__ bool is_last(int* shared) const {
    __syncthreads();
    if (threadIdx.x == 0) {
      while (owner().load(::cuda::memory_order_acquire) != launch_) {
      }
      const Left left(counter_->left);
      *shared = left.fetch_sub(1, ::cuda::memory_order_acq_rel) == 1;
      if (*shared != 0) owner().store(0, ::cuda::memory_order_relaxed);
    }
    __syncthreads();
    return *shared != 0;
  }

 private:
  using Owner = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;
  using Left = ::cuda::atomic_ref<int, ::cuda::thread_scope_device>;
  __device__ Owner owner() const { return Owner(counter_->owner); }

  ArrivalCounter* counter_;
  unsigned long long launch_;
};

}  // namespace flashsdk::sm80
