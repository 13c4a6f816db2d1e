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

// How the buffers of a ring come back: one is empty again when every consumer has released it. In shared memory.
template <int kStages>
struct EmptyRing {
  using State = RingState<kStages>;
  using Empty = cutlass::arch::ClusterBarrier;

  // By one thread, before a fence and __syncthreads.
  __device__ void init(int consumers) {
    for (auto& barrier : empty) barrier.init(consumers);
  }

  // Producer. All buffers are empty at first.
  __device__ void wait_empty(const State& s) const { empty[s.stage].wait(s.phase ^ 1); }
  // Consumer. Each warp releases once, when all its reads are done. thread: its number, if it is at hand.
  __device__ __forceinline__ void release(const State& s, int thread = threadIdx.x) const {
    if (thread % 32 == 0) empty[s.stage].arrive();
  }
  // Where lanes have read words that are stored anew, and nothing has brought them together since, each releases for
  // itself (docs/dev/gpu.md, racecheck).
  __device__ __forceinline__ void release_by_lane(const State& s) const { empty[s.stage].arrive(); }
  // The same by one lane, where the copy engine stores: behind a fence of all.
  __device__ __forceinline__ void release_after_reading(const State& s, int thread = threadIdx.x) const {
    cutlass::arch::fence_view_async_shared();
    release(s, thread);
  }

  Empty empty[kStages];
};

// A ring whose barriers also tell when a buffer is full: its producer has arrived and all announced bytes are there.
template <int kStages>
struct Ring : EmptyRing<kStages> {
  using State = RingState<kStages>;
  using Full = cutlass::arch::ClusterTransactionBarrier;

  __device__ void init(int producers, int consumers) {
    for (auto& barrier : full) barrier.init(producers);
    EmptyRing<kStages>::init(consumers);
  }

  // Producer.
  __device__ void announce(const State& s, std::uint32_t bytes) const { full[s.stage].arrive_and_expect_tx(bytes); }
  __device__ void arrive_full(const State& s) const { full[s.stage].arrive(); }
  // Consumer.
  __device__ void wait_full(const State& s) const { full[s.stage].wait(s.phase); }

  Full full[kStages];
};

}  // namespace flashsdk::sm90
