// Every named barrier of the SM90 kernels. A block has 16; 0 is __syncthreads.
#pragma once

#include <cstdint>

namespace flashsdk::sm90 {

// Forward and backward are kernels of their own, and so are the backward's first pass (RowSums) and its last (Convert):
// ids of different kernels may be the same.
namespace named_barrier {
constexpr std::uint32_t kForwardTurn = 1;      // + warpgroup, up to 3: whose products are issued next
constexpr std::uint32_t kForwardVote = 5;      // + warpgroup, up to 3: whether a try holds there
constexpr std::uint32_t kBackwardClear = 1;    // + 0, 1: the computing warpgroups have cleared rows that do not count
constexpr std::uint32_t kBackwardScores = 3;   // + buffer, up to 2: P has been handed over
constexpr std::uint32_t kBackwardDrawn = 5;    // + warpgroup: its warps have read, or drawn, what dropout decides by
constexpr std::uint32_t kBackwardRowSums = 1;  // + warpgroup: what its warps hand each other is in shared memory
constexpr std::uint32_t kBackwardConvert = 1;  // + warpgroup: its part of dQ is in shared memory
}  // namespace named_barrier

// Waits until `threads` threads, those that only arrive included, have come to the barrier.
__device__ __forceinline__ void barrier_sync(std::uint32_t id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// … and tells them whether `mine` is true for all of them.
__device__ __forceinline__ bool barrier_all(std::uint32_t id, int threads, bool mine) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred all, %2, %3, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(static_cast<int>(mine)), "r"(id), "r"(threads)
      : "memory");
  return all != 0;
}

}  // namespace flashsdk::sm90
