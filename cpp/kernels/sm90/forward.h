// The SM90 forward kernel: persistent blocks, one warp that loads, two or more warpgroups that compute.
//
// A warpgroup owns 64 queries of the block's tile. Its scores S = Q·Kᵀ, the softmax between the products and the sum
// O += P·V follow the online softmax of FlashAttention (arXiv 2205.14135). What keeps the tensor cores busy is
// FlashAttention-3's (arXiv 2407.08608): the scores of the next tile are started before this tile's P·V, whose result
// nobody waits for until the next softmax is done, and the warpgroups take turns in starting products, so that one's
// softmax runs under another's. Here the tiles of all work make one stream: the first scores of the next queries are
// computed under the last P·V of these, and the epilogue lies under the other warpgroups' products.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/forward_load.h"
#include "sm90/forward_scores.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

// Warpgroups start their products one after another.
template <int kWarpgroups>
class Turn {
 public:
  __device__ explicit Turn(int warpgroup) : warpgroup_(warpgroup) {
    if (warpgroup == kWarpgroups - 1) pass();  // the first one's turn
  }
  __device__ void wait() const {
    if constexpr (kWarpgroups > 1) barrier_sync(named_barrier::kForwardTurn + warpgroup_, 2 * kWarpgroup);
  }
  __device__ void pass() const {
    const int next = warpgroup_ == kWarpgroups - 1 ? 0 : warpgroup_ + 1;
    if constexpr (kWarpgroups > 1) barrier_arrive(named_barrier::kForwardTurn + next, 2 * kWarpgroup);
  }
  __device__ void end() const {
    if (warpgroup_ == 0) wait();  // as many waits as passes
  }

 private:
  int warpgroup_;
};

template <class Traits, class Policy, cuda::Features kFeatures>
__device__ void compute_output(const ForwardParams& p, typename Traits::Smem& smem, int warpgroup) {
  using cute::_;
  using MmaScores = typename Traits::MmaScores;
  using MmaOut = typename Traits::MmaOut;
  constexpr int kBlockN = Traits::kBlockN;
  auto sQ = cute::make_tensor(cute::make_smem_ptr(smem.q), typename Traits::SmemQ::RowMajor{});
  auto sK = cute::make_tensor(cute::make_smem_ptr(smem.k), typename Traits::SmemK::RowMajor{});
  auto sVt = cute::make_tensor(cute::make_smem_ptr(smem.v), typename Traits::SmemV::Transposed{});
  auto sQ_mine = cute::local_tile(sQ, Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDim>, Int<Traits::kQueryStages>>{},
                                  cute::make_coord(warpgroup, 0, 0));
  const auto queries = operand_a<MmaScores>(sQ_mine);
  const auto keys = operand_b<MmaScores>(sK);
  const auto values = operand_b<MmaOut>(sVt);

  RingState<Traits::kQueryStages> q_state;
  RingState<Traits::kStages> k_state, v_state;
  RingState<Traits::kTileSlots> slot;
  auto next_tile = [&] {
    smem.k_ring.wait_full(k_state);
    const KeyTileView tile(smem.tiles[slot.stage]);
    slot.advance();
    return tile;
  };
  auto start_scores = [&](auto& acc, const KeyTileView& tile) {
    if (tile.has(KeyTile::kFirst)) smem.q_ring.wait_full(q_state);
    start_gemm<MmaScores>(queries(_, _, _, q_state.stage), keys(_, _, _, k_state.stage), acc, false);
  };
  auto release_keys = [&](const KeyTileView& tile) {
    smem.k_ring.release(k_state);
    k_state.advance();
    if (tile.has(KeyTile::kLast)) {
      smem.q_ring.release(q_state);
      q_state.advance();
    }
  };

  KeyTileView tile = next_tile();
  if (tile.has(KeyTile::kEnd)) return;
  ForwardScores<Traits, Policy, kFeatures> scores(p, warpgroup);
  auto acc_out = accumulator<MmaOut, Traits::kHeadDimV>();
  auto probabilities = cute::make_tensor_like<typename Traits::Element>(accumulator<MmaScores, kBlockN>());
  const auto probabilities_a = as_operand_a(probabilities);
  auto start_out = [&](const KeyTileView& tile) {
    smem.v_ring.wait_full(v_state);
    start_gemm<MmaOut>(probabilities_a, values(_, _, _, v_state.stage), acc_out, !tile.has(KeyTile::kFirst));
  };
  auto finish_out = [&] {
    cute::warpgroup_wait<0>();
    finished(acc_out);
    smem.v_ring.release(v_state);
    v_state.advance();
  };

  {
    auto acc = accumulator<MmaScores, kBlockN>();
    start_scores(acc, tile);
    cute::warpgroup_wait<0>();
    finished(acc);
    release_keys(tile);
    scores.start(acc, tile);
    scores.keep(acc, probabilities, tile);
  }
  const Turn<Traits::kWarpgroups> turn(warpgroup);
  for (;;) {
    const KeyTileView next = next_tile();
    if (next.has(KeyTile::kEnd)) break;
    auto acc = accumulator<MmaScores, kBlockN>();
    turn.wait();
    start_scores(acc, next);
    start_out(tile);
    turn.pass();
    cute::warpgroup_wait<1>();
    finished(acc);
    release_keys(next);
    const auto factors = scores.apply(acc, next, tile);
    finish_out();
    scores.keep(acc, probabilities, next);
    factors.apply(acc_out);
    if (next.has(KeyTile::kFirst)) scores.write(acc_out, tile);
    tile = next;
  }
  turn.end();
  start_out(tile);
  const auto factors = scores.close(tile);
  finish_out();
  factors.apply(acc_out);
  scores.write(acc_out, tile);
}

template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ ForwardMaps maps,
                   const __grid_constant__ ForwardSchedule schedule) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Traits::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    constexpr int kWarps = 4 * Traits::kWarpgroups;
    smem.q_ring.init(1, kWarps);
    smem.k_ring.init(1, kWarps);
    smem.v_ring.init(1, kWarps);
    smem.tail.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // tells the compiler that a warp has one role
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (warp == 0) {
      ForwardLoader<Traits, Policy>(p, maps, smem).run(WorkStream(schedule));
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
    compute_output<Traits, Policy, kFeatures>(p, smem, warp / 4 - 1);
  }
}

}  // namespace flashsdk::sm90
