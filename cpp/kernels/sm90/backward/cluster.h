// What the CTAs of a cluster of two tell each other: barriers, copies and numbers in the other's shared memory.
#pragma once

#include <cstdint>

#include <cute/arch/cluster_sm90.hpp>

#include "sm90/pipeline.h"

namespace flashsdk::sm90 {

__device__ __forceinline__ int cluster_rank() { return static_cast<int>(cute::block_rank_in_cluster()); }
__device__ __forceinline__ int peer_rank() { return cluster_rank() ^ 1; }

// Each warp of both CTAs releases once: a buffer that both CTAs read, or write to.
template <int kStages>
__device__ __forceinline__ void release_in_cluster(const EmptyRing<kStages>& ring, const RingSlot<kStages>& slot,
                                                   int thread) {
  if (thread % 32 == 0) {
    ring.empty[slot.stage].arrive();
    ring.empty[slot.stage].arrive(static_cast<std::uint32_t>(peer_rank()));
  }
}

// One thread: shared memory to the same place, `to`, of the other CTA, whose barrier is told of the bytes.
__device__ __forceinline__ void copy_to_peer(void* to, const void* from, int bytes,
                                             cutlass::arch::ClusterTransactionBarrier& barrier) {
  const auto rank = static_cast<std::uint32_t>(peer_rank());
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(cute::cast_smem_ptr_to_uint(to), rank)),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes),
               "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&barrier), rank))
               : "memory");
}

// Numbers that the first CTA draws, one after another, and both get. In shared memory of both.
struct SharedIndex {
  // By one thread, before a fence and the cluster's barrier.
  __device__ void init() { ring.init(1, 1); }

  // One thread of each CTA; n: numbers before.
  template <class Draw>
  __device__ __forceinline__ int next(unsigned n, Draw&& draw) {
    const auto slot = RingSlot<2>::after(n);
    if (cluster_rank() == 0) {
      const int index = draw();
      ring.wait_empty(slot);
      cute::store_shared_remote(static_cast<std::uint32_t>(index), cute::cast_smem_ptr_to_uint(&value[slot.stage]),
                                cute::cast_smem_ptr_to_uint(&ring.full[slot.stage]), 1);
      return index;
    }
    ring.expect(slot, sizeof(int));
    ring.wait_full(slot);
    const int index = const_cast<volatile int&>(value[slot.stage]);
    ring.empty[slot.stage].arrive(0u);  // of the first CTA
    return index;
  }

  int value[2];
  Ring<2> ring;
};

}  // namespace flashsdk::sm90
