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
// exp2(scale·(score − reference)) neither overflows nor loses what counts. Where the sums say that it did not do, the
// scores, overwritten by then, are computed once more: at once, after a vote, or, where the vote is deferred, before
// the next scores, if some thread has left the tile's number in shared memory.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "sm90/forward_load.h"
#include "sm90/forward_scores.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

// Warpgroups start their products one after another, if they are to.
template <int kWarpgroups, bool kTurns>
class Turn {
 public:
  __device__ explicit Turn(int warpgroup) : warpgroup_(warpgroup) {
    if (warpgroup == kWarpgroups - 1) pass();  // the first one's turn
  }
  __device__ void wait() const {
    if constexpr (kNeeded) barrier_sync(named_barrier::kForwardTurn + warpgroup_, 2 * kWarpgroup);
  }
  __device__ void pass() const {
    const int next = warpgroup_ == kWarpgroups - 1 ? 0 : warpgroup_ + 1;
    if constexpr (kNeeded) barrier_arrive(named_barrier::kForwardTurn + next, 2 * kWarpgroup);
  }
  __device__ void end() const {
    if (warpgroup_ == 0) wait();  // as many waits as passes
  }

 private:
  static constexpr bool kNeeded = kTurns && kWarpgroups > 1;
  int warpgroup_;
};

// What the loading warps hand over, by the numbers of tiles of keys and of queries.
template <class Traits>
class ForwardInput {
 public:
  using Keys = RingState<Traits::kKeyStages>;
  using Values = RingState<Traits::kValueStages>;
  using Queries = RingState<Traits::kQueryStages>;

  __device__ explicit ForwardInput(typename Traits::Smem& smem) : smem_(smem) {}

  __device__ KeyTile announcement(unsigned index) const {
    const unsigned slot = index % Traits::kSlots;
    if constexpr (Traits::kReadsAhead) {
      smem_.announced[slot].wait(index / Traits::kSlots & 1);
    } else {
      smem_.k_ring.wait_full(Keys::after(index));
    }
    return smem_.key_tiles[slot];
  }
  __device__ void wait_for_keys(unsigned index) const {
    if constexpr (Traits::kReadsAhead) smem_.k_ring.wait_full(Keys::after(index));
  }
  __device__ void release_keys(const KeyTile& tile, unsigned index, unsigned work) const {
    smem_.k_ring.release(Keys::after(index));
    if (tile.has(KeyTile::kLast)) smem_.q_ring.release(Queries::after(work));
  }
  __device__ const QueryTile& queries_of(unsigned work) const { return smem_.query_tiles[work % Traits::kSlots]; }

 private:
  typename Traits::Smem& smem_;
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

  using Input = ForwardInput<Traits>;
  const Input input(smem);
  auto of = [&](unsigned work) -> const QueryTile& { return input.queries_of(work); };
  auto start_scores = [&](auto& acc, const KeyTile& tile, unsigned index, unsigned work) {
    const auto q = Input::Queries::after(work);
    if (tile.has(KeyTile::kFirst)) smem.q_ring.wait_full(q);
    start_gemm<MmaScores>(queries(_, _, _, q.stage), keys(_, _, _, Input::Keys::after(index).stage), acc, false);
  };

  unsigned index = 0, work = 0;  // of the tile whose P·V comes next: counts tiles of keys, and of queries
  KeyTile tile = input.announcement(index);
  if (tile.has(KeyTile::kEnd)) return;
  input.wait_for_keys(index);
  using Scores = ForwardScores<Traits, Policy, kFeatures>;
  Scores scores(p, warpgroup);
  auto acc_out = accumulator<MmaOut, Traits::kHeadDimV>();
  auto probabilities = cute::make_tensor_like<typename Traits::Element>(accumulator<MmaScores, kBlockN>());
  const auto probabilities_a = as_operand_a(probabilities);
  auto start_out = [&] {
    const auto v = Input::Values::after(index);
    smem.v_ring.wait_full(v);
    start_gemm<MmaOut>(probabilities_a, values(_, _, _, v.stage), acc_out, !tile.has(KeyTile::kFirst));
  };
  auto owes_output = [&] { return Traits::kWritesLate && tile.has(KeyTile::kFirst) && work > 0; };
  auto finish_out = [&] {
    cute::warpgroup_wait<0>();
    finished(acc_out);
    smem.v_ring.release(Input::Values::after(index));
  };

  unsigned* const failed = smem.failed[warpgroup];
  auto remake_failed = [&] {  // P of this tile, if a try has failed for it
    const bool has_failed = reinterpret_cast<const volatile unsigned*>(failed)[index & 1] == index;
    cuda::branch_if(has_failed, [&] {
      auto acc = accumulator<MmaScores, kBlockN>();
      start_scores(acc, tile, index, work);
      cute::warpgroup_wait<0>();
      finished(acc);
      typename Scores::Factors factors;
      scores.undo_try();
      scores.apply(acc, factors, tile, of(work), scores.visible(tile, of(work)), true);
      scores.keep(acc, probabilities, tile, of(work));
      if (!tile.has(KeyTile::kFirst)) factors.apply(acc_out);
    });
  };

  {
    auto acc = accumulator<MmaScores, kBlockN>();
    start_scores(acc, tile, index, work);
    cute::warpgroup_wait<0>();
    finished(acc);
    if constexpr (!Traits::kDefersVote) input.release_keys(tile, index, work);
    scores.start(acc, tile, of(work));
    scores.keep(acc, probabilities, tile, of(work));
  }
  const Turn<Traits::kWarpgroups, Traits::kTurns> turn(warpgroup);
  KeyTile next = input.announcement(index + 1);
  for (;;) {
    const bool ends = next.has(KeyTile::kEnd);
    if (ends) {
      if constexpr (Traits::kDefersVote) scores.meet();
    } else {
      input.wait_for_keys(index + 1);
      turn.wait();
    }
    if constexpr (Traits::kDefersVote) remake_failed();
    if (ends) break;
    if constexpr (Traits::kDefersVote) input.release_keys(tile, index, work);
    if constexpr (Traits::kSkips) {
      if (next.has(KeyTile::kHidden, warpgroup)) {  // its probabilities are 0
        start_out();
        turn.pass();
        input.release_keys(next, index + 1, work);
        finish_out();
        cute::clear(probabilities);
        tile = next;
        next = input.announcement(++index + 1);
        continue;
      }
    }
    const unsigned next_work = work + (next.has(KeyTile::kFirst) ? 1 : 0);
    auto acc = accumulator<MmaScores, kBlockN>();
    start_scores(acc, next, index + 1, next_work);
    const bool writes = owes_output();
    cuda::branch_if(writes, [&] {
      turn.pass();
      scores.write(acc_out, of(work - 1));
    });
    start_out();
    if (!writes) turn.pass();
    KeyTile after;
    if constexpr (Traits::kReadsAhead) after = input.announcement(index + 2);
    const auto visible = scores.visible(next, of(next_work));
    cute::warpgroup_wait<1>();
    finished(acc);
    typename Scores::Factors factors;
    const bool tries = Traits::kTries && scores.can_try(next);
    if constexpr (Traits::kDefersVote) {
      if (tries && !scores.try_apply(acc, factors, next, of(next_work), visible)) failed[(index + 1) & 1] = index + 1;
      cuda::branch_if(!tries, [&] { scores.apply(acc, factors, next, of(next_work), visible, false); });
    } else if constexpr (Traits::kTries) {
      cuda::branch_if(!tries || !scores.try_apply(acc, factors, next, of(next_work), visible), [&] {
        if (tries) {  // the scores were lost by it: once more
          cute::warpgroup_wait<0>();
          finished(acc_out);
          start_scores(acc, next, index + 1, next_work);
          cute::warpgroup_wait<0>();
          finished(acc);
        }
        scores.apply(acc, factors, next, of(next_work), visible, tries);
      });
      input.release_keys(next, index + 1, next_work);
    } else {
      input.release_keys(next, index + 1, next_work);
      scores.apply(acc, factors, next, of(next_work), visible, false);
    }
    finish_out();
    scores.keep(acc, probabilities, next, of(next_work));
    factors.apply(acc_out);
    if constexpr (!Traits::kWritesLate) {
      if (next.has(KeyTile::kFirst)) scores.write(acc_out, of(work));
    }
    tile = next;
    work = next_work;
    ++index;
    if constexpr (Traits::kReadsAhead) {
      next = after;
    } else {
      next = input.announcement(index + 1);
    }
  }
  turn.end();
  cuda::branch_if(owes_output(), [&] { scores.write(acc_out, of(work - 1)); });
  start_out();
  typename Scores::Factors factors;
  scores.close(factors);
  finish_out();
  factors.apply(acc_out);
  scores.write(acc_out, of(work));
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
    smem.v_ring.init(32, kWarps);
    for (auto& barrier : smem.announced) barrier.init(1);
    for (auto& of_warpgroup : smem.failed) of_warpgroup[0] = of_warpgroup[1] = ~0u;
    smem.tail.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // tells the compiler that a warp has one role
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (warp == 0) {
      KeyLoader<Traits, Policy>(p, maps, smem).run(WorkStream<Traits::kByWarpgroup>(p, schedule, Traits::kBlockM));
    } else if (warp == 1) {
      ValueLoader<Traits>(p, maps, smem).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kComputeRegisters>();
    compute_output<Traits, Policy, kFeatures>(p, smem, warp / 4 - 1);
  }
}

}  // namespace flashsdk::sm90
