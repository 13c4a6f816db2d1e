// Where persistent CTAs draw the number of the tile that they work on next, once each has begun with that of its index.
// Whoever is done first draws first, so tiles may differ in cost. A source has draw(), by one thread: the next number
// of its counter.
#pragma once

#include <cuda/atomic>

namespace flashsdk::sm90 {

// The counter is 0 when the kernel begins, as the pass before has cleared it: the backward's.
struct ClearedTickets {
  int* counter;

  __device__ __forceinline__ int draw() const { return atomicAdd(counter, 1); }
};

// What a kernel without a pass before it keeps in the caller's workspace, which may hold anything at first.
struct TicketCounter {
  unsigned long long owner;
  int next;  // tile
  int left;  // CTAs that still draw
};

// CTA 0 sets the counter up under the launch's own 64-bit name while the others work on their first tile, and the last
// one to leave takes the name away, for when a graph launches it again. Drawn numbers begin with that of the CTAs.
struct NamedTickets {
  TicketCounter* counter;  // null: nothing is drawn
  unsigned long long launch;

  __device__ bool any() const { return counter != nullptr; }
  // One thread of CTA 0, before all else.
  __device__ void set_up() const {
    counter->next = counter->left = gridDim.x;
    owner().store(launch, ::cuda::memory_order_release);
  }
  // first: this thread has not drawn yet.
  __device__ int draw(bool first) const {
    if (first) wait_for_owner();
    return atomicAdd(&counter->next, 1);
  }
  // One thread of each CTA, when it has drawn for the last time.
  __device__ void leave() const {
    wait_for_owner();
    if (atomicSub(&counter->left, 1) == 1) owner().store(0, ::cuda::memory_order_relaxed);
  }

 private:
  using Owner = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;
  __device__ Owner owner() const { return Owner(counter->owner); }
  __device__ void wait_for_owner() const {
    while (owner().load(::cuda::memory_order_acquire) != launch) {
    }
  }
};

}  // namespace flashsdk::sm90
