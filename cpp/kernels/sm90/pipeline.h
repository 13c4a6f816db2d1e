// Rings of shared-memory buffers between a producer (TMA) and consumers (warpgroups), on mbarriers.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

namespace flashsdk::sm90 {

// Which buffer of a ring it is, and in which round.
template <int kStages>
struct RingState {
  int stage = 0;
  std::uint32_t phase = 0;

  // After `count` buffers have been used.
  static __device__ __forceinline__ RingState after(unsigned count) {
    return {static_cast<int>(count % kStages), count / kStages & 1};
  }
};

// The barriers of a ring, in shared memory. A buffer is full when its producer has arrived and all announced bytes are
// there, and empty again when every consumer warp has released it.
template <int kStages>
struct Ring {
  using State = RingState<kStages>;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;

  // By one thread, before a fence and __syncthreads.
  __device__ void init(int producers, int consumers) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumers);
    }
  }

  // Producer. All buffers are empty at first.
  __device__ void wait_empty(const State& s) const { empty[s.stage].wait(s.phase ^ 1); }
  __device__ void announce(const State& s, std::uint32_t bytes) const { full[s.stage].arrive_and_expect_tx(bytes); }
  __device__ void arrive_full(const State& s) const { full[s.stage].arrive(); }

  // Consumer. Each warp releases once, when all its reads are done. thread: its number, if it is at hand.
  __device__ void wait_full(const State& s) const { full[s.stage].wait(s.phase); }
  __device__ __forceinline__ void release(const State& s, int thread = threadIdx.x) const {
    if (thread % 32 == 0) empty[s.stage].arrive();
  }

  Full full[kStages];
  Empty empty[kStages];
};

}  // namespace flashsdk::sm90
