// The SM90 backward kernel (FlashAttention-3, arXiv 2407.08608, section 3, has its parts; docs/dev/sm90-backward.md
// says what is different here): a warp that walks, one that loads, two that add dQ to device memory, and warpgroups
// that compute.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/backward/load.h"
#include "sm90/backward/warpgroup.h"
#include "sm90/backward/wide.h"

namespace flashsdk::sm90 {

// The roles of a thread block.
template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
__device__ __forceinline__ void backward_roles(const BackwardParams& p, const BackwardMaps& maps,
                                               const cuda::BackwardWorkspace& ws,
                                               const cuda::BackwardSchedule& schedule, typename Traits::Smem& smem) {
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for all lanes
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (threadIdx.x % 32 != 0 && !(kRagged && warp == 0)) return;
    if (warp == 0) {
      plan_steps<Traits, Policy, kRagged>(p, ws, schedule, smem);
    } else if (warp == 1) {
      load_operands<Traits, kRagged>(p, maps, ws, smem);
    } else if constexpr (Traits::kClusterSize == 1) {
      add_dq<Traits>(p, ws, smem, warp - 2);
    } else if (warp == 2) {
      send_ds<Traits>(smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
    if constexpr (Traits::kWide)
      WideBackwardWarpgroup<Traits, Policy, kFeatures, kRagged>(p, ws, smem, warp / 4 - 1).run();
    else
      BackwardWarpgroup<Traits, Policy, kFeatures, kRagged>(p, smem, warp / 4 - 1).run();
  }
}

template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                    const __grid_constant__ cuda::BackwardWorkspace ws,
                    const __grid_constant__ cuda::BackwardSchedule schedule) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_maps(maps.q, maps.k, maps.v, maps.dout);
    smem.init();
  }
  cutlass::arch::fence_barrier_init();
  __syncthreads();
  cuda::allow_next_kernel();       // the last pass
  cuda::wait_for_kernel_before();  // for what the first pass writes
  backward_roles<Traits, Policy, kFeatures, kRagged>(p, maps, ws, schedule, smem);
}

// The same by clusters of two CTAs. Neither ends while the other may still reach into its shared memory.
template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
__global__ void __cluster_dims__(Traits::kClusterSize) __launch_bounds__(Traits::kThreads, 1)
    backward_cluster_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardMaps maps,
                            const __grid_constant__ cuda::BackwardWorkspace ws,
                            const __grid_constant__ cuda::BackwardSchedule schedule) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_maps(maps.q, maps.k, maps.v, maps.dout);
    smem.init();
  }
  cutlass::arch::fence_barrier_init();
  cute::cluster_sync();
  cuda::allow_next_kernel();
  cuda::wait_for_kernel_before();
  backward_roles<Traits, Policy, kFeatures, kRagged>(p, maps, ws, schedule, smem);
  __syncwarp();  // of warps of which one lane worked
  cute::cluster_sync();
}

// dq_accum times the softmax scale, in 16 bits, to dq, for one tile of queries.
template <class Traits>
__device__ void convert_dq_tile(const BackwardParams& p, const cuda::BackwardWorkspace& ws, int m_block, int head,
                                int batch) {
  using Element = typename Traits::Element;
  using MmaDq = typename Traits::MmaDq;
  constexpr int kColumns = Traits::kDqColumns, kVectors = kWarpgroupRows / 8;
  const SeqlenInfo seq(p, batch);
  if (m_block * Traits::kBlockM >= seq.seqlen_q) return;
  __shared__ alignas(1024) Element smem[Traits::kDqPieces][Traits::kDqElements];
  const int piece = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;

  auto acc = accumulator<MmaDq, kColumns>();
  const std::int64_t place = ws.tile<Traits::kBlockM>(p, seq, batch, head, m_block) * Traits::kDqPieces + piece;
  const float* from = ws.dq_accum + place * Traits::kDqElements;
  const bool written = Traits::kClearsDq || p.deterministic || FirstWriter::any(ws.dq_order[place]);
  CUTE_UNROLL
  for (int e = 0; e < cute::size(acc); e += 4) {
    const float4 four = reinterpret_cast<const float4*>(from)[e / 4 * kWarpgroup + thread];
    const float values[] = {four.x, four.y, four.z, four.w};
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) acc(e + i) = written ? values[i] * p.score.softmax_scale : 0.f;
  }
  store_transposed(convert<Element>(acc), smem[piece], thread);
  barrier_sync(named_barrier::kBackwardConvert + piece, kWarpgroup);

  const int m0 = m_block * Traits::kBlockM + piece / Traits::kDqRowPieces * kColumns;
  const int column0 = piece % Traits::kDqRowPieces * kWarpgroupRows;
  Element* dq = seq.head_q<Element>(p.dq, batch, head) + column0;
  for (int i = thread; i < kColumns * kVectors; i += kWarpgroup) {
    const int row = i / kVectors, vector = i % kVectors;
    if (m0 + row < seq.seqlen_q && column0 + vector * 8 < p.head_dim) {
      *reinterpret_cast<uint4*>(dq + (m0 + row) * p.dq.row + vector * 8) =
          reinterpret_cast<const uint4*>(smem[piece])[row * kVectors + (vector ^ (row % 8))];
    }
  }
}

// Grid: cuda::query_tile_grid().
template <class Traits, bool kPacked>
__global__ void __launch_bounds__(Traits::kDqPieces* kWarpgroup)
    backward_convert_dq_kernel(const __grid_constant__ BackwardParams p,
                               const __grid_constant__ cuda::BackwardWorkspace ws) {
  cuda::wait_for_kernel_before();
  cuda::for_each_query_tile<kPacked, Traits::kBlockM>(p, [&](int m_block, int head, int batch) {
    convert_dq_tile<Traits>(p, ws, m_block, head, batch);
    __syncthreads();  // shared memory is free for the next one
  });
}

}  // namespace flashsdk::sm90
