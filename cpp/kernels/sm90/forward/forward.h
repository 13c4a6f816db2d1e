// The SM90 forward kernel: persistent blocks, two warps that load, two or more warpgroups that compute.
//
// A warpgroup owns 64 queries of the block's tile. Its scores S = Q·Kᵀ, the softmax between the products and the sum
// O += P·V follow the online softmax of FlashAttention (arXiv 2205.14135). What keeps the tensor cores busy is
// FlashAttention-3's (arXiv 2407.08608): the scores of the next tile are started before this tile's P·V, whose result
// nobody waits for until the next softmax is done, and the warpgroups take turns in starting products, so that one's
// softmax runs under another's. Here the tiles of all work make one stream: the first scores of the next queries are
// computed under the last P·V of these, and the epilogue lies under the other warpgroups' products.
//
// Nor do the exponentials of a tile wait for its maximum. They try the maximum so far, or that of a few keys where the
// queries are new, which nearly always does: any reference is exact in floating point while
// exp2(scale·(score − reference)) neither overflows nor loses what counts. Where the sums say that it did not do, or no
// try can be made, the scores are computed once more.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/forward/load.h"
#include "sm90/forward/warpgroup.h"

namespace flashsdk::sm90 {

template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardSchedule schedule) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<ForwardSmem<Traits, kFeatures>*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_maps(maps.q, maps.k, maps.v);
    constexpr int kWarps = 4 * Traits::kWarpgroups;
    smem.q_ring.init(1, kWarps);
    smem.k_ring.init(1, kWarps);
    smem.v_ring.init(32, kWarps);
    smem.step_ring.init();
    smem.tail.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = cuda::warp_uniform(threadIdx.x / 32);  // tells the compiler that a warp has one role
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (warp == 0) {
      KeyLoader<Traits, Policy, kFeatures>(p, maps, smem).run(WorkStream(p, schedule, Traits::kBlockM));
    } else if (warp == 1) {
      ValueLoader<Traits>(p, maps, smem).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
    ForwardWarpgroup<Traits, Policy, kFeatures>(p, smem, warp / 4 - 1).run();
  }
}

}  // namespace flashsdk::sm90
