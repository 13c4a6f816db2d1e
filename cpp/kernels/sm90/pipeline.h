// Rings of shared-memory buffers between a producer (TMA) and consumers (warpgroups), on mbarriers.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

namespace flashsdk::sm90 {

// Which buffer of a ring it is, and in which round.
template <int kStages>
struct RingSlot {
  int stage = 0;
  std::uint32_t phase = 0;

  // After `count` buffers have been used.
  static __device__ __forceinline__ RingSlot after(unsigned count) {
    return {static_cast<int>(count % kStages), count / kStages & 1};
  }
};

// How the buffers of a ring come back: one is empty again when every consumer has released it. In shared memory.
template <int kStages>
struct EmptyRing {
  using Slot = RingSlot<kStages>;
  using Empty = cutlass::arch::ClusterBarrier;

  // By one thread, before a fence and __syncthreads.
  __device__ void init(int consumers) {
    for (auto& barrier : empty) barrier.init(consumers);
  }

  // Producer. All buffers are empty at first.
  __device__ void wait_empty(const Slot& s) const { empty[s.stage].wait(s.phase ^ 1); }
  // Consumer. Each warp releases once, when all its reads are done. thread: its number, if it is at hand.
  __device__ __forceinline__ void release(const Slot& s, int thread = threadIdx.x) const {
    if (thread % 32 == 0) empty[s.stage].arrive();
  }
  // Where lanes have read words that are stored anew, and nothing has brought them together since, each releases for
  // itself (docs/dev/gpu.md, racecheck).
  __device__ __forceinline__ void release_by_lane(const Slot& s) const { empty[s.stage].arrive(); }
  // The same by one lane, where the copy engine stores: behind a fence of all.
  __device__ __forceinline__ void release_after_reading(const Slot& s, int thread = threadIdx.x) const {
    cutlass::arch::fence_view_async_shared();
    release(s, thread);
  }

  Empty empty[kStages];
};

// How they are handed over: one is full when every producer has arrived and all bytes are there that they expect.
template <int kStages>
struct FullRing {
  using Slot = RingSlot<kStages>;
  using Full = cutlass::arch::ClusterTransactionBarrier;

  __device__ void init(int producers) {
    for (auto& barrier : full) barrier.init(producers);
  }

  // Producer.
  __device__ void expect(const Slot& s, std::uint32_t bytes) const { full[s.stage].arrive_and_expect_tx(bytes); }
  __device__ void arrive_full(const Slot& s) const { full[s.stage].arrive(); }
  // Consumer.
  __device__ void wait_full(const Slot& s) const { full[s.stage].wait(s.phase); }

  Full full[kStages];
};

template <int kStages>
struct Ring : EmptyRing<kStages>, FullRing<kStages> {
  __device__ void init(int producers, int consumers) {
    FullRing<kStages>::init(producers);
    EmptyRing<kStages>::init(consumers);
  }
};

}  // namespace flashsdk::sm90
