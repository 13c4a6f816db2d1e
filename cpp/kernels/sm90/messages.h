// How the warp that walks the mask tells the others what comes. Forward and backward have two kinds of message: work,
// a tile that the schedule gives to the CTA, and steps, the tiles that the mask leaves of its row or column.
#pragma once

#include <type_traits>

#include "sm90/pipeline.h"

namespace flashsdk::sm90 {

// In shared memory, as all here: message n, from 0, lies in slot n % kSlots until message n + kSlots is told.
template <class T, int kSlots>
struct MessageSlots {
  using Slot = RingSlot<kSlots>;
  T slots[kSlots];

  __device__ __forceinline__ T& of(const Slot& slot) { return slots[slot.stage]; }
  __device__ __forceinline__ const T& of(const Slot& slot) const { return slots[slot.stage]; }
  // Of message n, where no barrier is asked.
  __device__ __forceinline__ T& of(unsigned n) { return slots[n % kSlots]; }
  __device__ __forceinline__ const T& of(unsigned n) const { return slots[n % kSlots]; }
};

// The mbarriers that say that a message is there, and that it has been read. kReaders: how many release a slot. 0 where
// nobody does, as the telling warp is never kSlots ahead: what it waits for beside is released by the same readers.
// Slots lie elsewhere, as the buffers of all rings do.
template <class T, int kSlots, int kReaders>
struct Messages : std::conditional_t<kReaders != 0, Ring<kSlots>, FullRing<kSlots>> {
  using Slots = MessageSlots<T, kSlots>;
  using Slot = RingSlot<kSlots>;

  // By one thread, before a fence and __syncthreads.
  __device__ void init() {
    if constexpr (kReaders != 0)
      Ring<kSlots>::init(1, kReaders);
    else
      FullRing<kSlots>::init(1);
  }

  // One thread of the telling warp.
  __device__ __forceinline__ void tell(Slots& slots, unsigned n, const T& message) const {
    const Slot slot = Slot::after(n);
    if constexpr (kReaders != 0) this->wait_empty(slot);
    slots.of(slot) = message;
    this->arrive_full(slot);
  }
  // A reader.
  __device__ __forceinline__ T read(const Slots& slots, const Slot& slot) const {
    this->wait_full(slot);
    return slots.of(slot);
  }
};

}  // namespace flashsdk::sm90
