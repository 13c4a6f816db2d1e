// Who brings dQ to a piece of dq_accum, and when: CTAs ask each other by words of BackwardWorkspace::dq_order. Each
// class here owns what its words mean, for one thread of a CTA: InTurn in deterministic calls, FirstWriter in others
// where dq_accum is not cleared. What they order are bulk_write()s.
#pragma once

#include <cstdint>

#include "sm90/tma.h"

namespace flashsdk::sm90 {

// global = shared, or += where it adds, in fp32, by the copy engine. Returns when shared has been read.
__device__ __forceinline__ void bulk_write(float* global, const float* shared, int bytes, bool adds) {
  const std::uint32_t from = cute::cast_smem_ptr_to_uint(shared);
  if (adds) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(global),
        "r"(from), "r"(bytes), "l"(CacheHint::EVICT_LAST)
        : "memory");
  } else {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(from), "r"(bytes)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// A piece of dq_accum is handed from block to block, by what one thread of each knows of it.
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void after_acquire() {
  asm volatile("fence.proxy.async;" ::: "memory");  // from here on also for the copy engine
}
// When this thread's bulk_write()s are done, but for the last kNewer.
template <int kNewer>
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kNewer) : "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}

// Who comes first to a piece writes it, and the others add after that. A word of each piece, zero at first.
class FirstWriter {
 public:
  explicit __device__ FirstWriter(int* state) : state_(state) {}

  // Whether the piece has been written.
  __device__ __forceinline__ bool has_written() const {
    if (load_acquire(state_) != kWritten) return false;
    after_acquire();
    return true;
  }
  // Whether this thread is to write it; else it has been written by now. Its dQ must be at hand: others wait.
  __device__ __forceinline__ bool claim() const {
    if (atomicCAS(state_, kNothing, kWriting) == kNothing) return true;
    while (!has_written()) {
    }
    return false;
  }
  // Once bulk_write() is done.
  __device__ __forceinline__ void publish() const { store_release<0>(state_, kWritten); }

  // Whether a piece has been written, after the kernel.
  static __device__ __forceinline__ bool any(int state) { return state != kNothing; }

 private:
  static constexpr int kNothing = 0, kWriting = 1, kWritten = 2;
  int* state_;
};

// Key tiles add to all pieces of a tile of queries when their turns come (common/turn_order.h). A word of each tile
// counts the turns that were taken, from zero.
class InTurn {
 public:
  // Whether turn `mine` has come, at a tile with that word. Call after_acquire() then.
  static __device__ __forceinline__ bool has_come(const int* taken, int mine) { return load_acquire(taken) == mine; }
  // It is this thread's from here on, until pass().
  __device__ __forceinline__ void hold(int* taken, int mine) {
    held_ = taken;
    next_ = mine + 1;
  }
  // Passes on the turn that is still held, if one is, when all but the last kNewer bulk_write()s are done.
  template <int kNewer>
  __device__ __forceinline__ void pass() {
    if (held_ != nullptr) store_release<kNewer>(held_, next_);
    held_ = nullptr;
  }

 private:
  int* held_ = nullptr;
  int next_ = 0;
};

}  // namespace flashsdk::sm90
