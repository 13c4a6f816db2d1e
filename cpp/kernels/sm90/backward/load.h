// The roles of the SM90 backward that do not compute, one warp each, of which one thread works: one walks the queries
// and tells the others, one loads, and one for each computing warpgroup adds to dq_accum. In ragged calls, whose
// sequences have lengths of their own, the other lanes of the first help it to find its next tile.
#pragma once

#include "cuda/pass/backward_workspace.h"
#include "cuda/schedule/backward_stream.h"
#include "cuda/schedule/ragged_tiles.h"
#include "sm90/backward/dq_order.h"
#include "sm90/backward/traits.h"
#include "sm90/tickets.h"
#include "sm90/tma.h"

namespace flashsdk::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

// What every role but the walking one does, by whole warps or by one thread: f(work) for each key tile of this thread
// block.
template <class Traits, class F>
__device__ void for_each_work(typename Traits::Smem& smem, F&& f) {
  for (unsigned n = 0;; ++n) {
    const auto slot = RingSlot<2>::after(n);
    const BackwardWork work = smem.work_ring.read(smem.work, slot);
    smem.work_ring.release_by_lane(slot);
    if (work.stop) return;
    f(work);
  }
}

// f(planned step) for each tile of queries of a key tile, by one thread. steps: so far, of all key tiles.
template <class Traits, class F>
__device__ __forceinline__ void for_each_step(typename Traits::Smem& smem, unsigned& steps, F&& f) {
  for (bool last = false; !last; ++steps) {
    const auto slot = RingSlot<kPlannedSteps>::after(steps);
    const PlannedStep planned = smem.plan_ring.read(smem.plan, slot);
    smem.plan_ring.release(slot, 0);
    last = planned.step.last;
    f(planned);
  }
}

// One thread: Q and lse, or dO and delta, of the next step. The barrier is told of their bytes. Other key tiles read
// them soon, and add to the same dQ: L2 should keep these rather than keys and gradients, which are touched once.
template <class Tile, int kClusterSize, class Element, class Rows>
__device__ __forceinline__ void load_queries(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& barrier,
                                             Element* smem, TileOrigin at, const void* rows, Rows& smem_rows) {
  constexpr int kRowBytes = static_cast<int>(sizeof(Rows));
  barrier.arrive_and_expect_tx(Tile::kBytes + kRowBytes);
  load_shared_tile<Tile, kClusterSize>(map, barrier, smem, at, CacheHint::EVICT_LAST);
  cute::SM90_BULK_COPY_G2S::copy(rows, reinterpret_cast<std::uint64_t*>(&barrier), &smem_rows, kRowBytes);
}

// The first key that this CTA owns, of a key tile.
template <class Traits>
__device__ __forceinline__ int first_key(const cuda::TileWork& work) {
  return work.block * Traits::kBlockN + (Traits::kClusterSize > 1 ? cluster_rank() * Traits::kCtaKeys : 0);
}

// One thread: a tile of K or V, when its place is free.
template <class Tile, class Traits, int kBuffers>
__device__ __forceinline__ void load_keys(const CUtensorMap& map, Ring<kBuffers>& ring, unsigned n,
                                          typename Traits::Element* smem, const cuda::TileWork& work,
                                          const SeqlenInfo& seq, int batch) {
  const auto slot = RingSlot<kBuffers>::after(n);
  ring.wait_empty(slot);
  ring.expect(slot, Tile::kBytes);
  load_tile<Tile>(map, ring.full[slot.stage], smem + slot.stage * Tile::kElements,
                  {seq.offset_k + first_key<Traits>(work), work.head, batch}, CacheHint::EVICT_FIRST);
}

// In a cluster: K, and of the other CTA's K the columns whose dQ this CTA computes.
template <class Traits>
__device__ __forceinline__ void load_pair_keys(const CUtensorMap& map, typename Traits::Smem& smem, unsigned n,
                                               const cuda::TileWork& work, const SeqlenInfo& seq, int batch) {
  using SmemK = typename Traits::SmemK;
  using SmemPeerK = typename Traits::SmemPeerK;
  const auto slot = RingSlot<1>::after(n);
  const int row = seq.offset_k + work.block * Traits::kBlockN;
  smem.k_ring.wait_empty(slot);
  smem.k_ring.expect(slot, SmemK::kBytes + SmemPeerK::kBytes);
  load_tile<SmemK>(map, smem.k_ring.full[0], smem.k, {row + cluster_rank() * Traits::kCtaKeys, work.head, batch});
  load_tile<SmemPeerK>(map, smem.k_ring.full[0], smem.peer_k, {row + peer_rank() * Traits::kCtaKeys, work.head, batch},
                       CacheHint::EVICT_NORMAL, cluster_rank() * SmemPeerK::kColumns);
}

// One thread tells all warps what comes: it takes key tiles off the schedule and walks the queries that see them. A
// walk does not fit the few registers of these warps and is slow, so this thread does nothing else and is up to
// kPlannedSteps ahead. kRagged: called by its whole warp, of which lane 0 tells.
//
//   work_ring   one entry a key tile, and one that says there are no more: read by for_each_work()
//   plan_ring   one entry a step, which is a tile of queries that sees the key tile: read by for_each_step()
template <class Traits, class Policy, bool kRagged>
__device__ void plan_steps(const BackwardParams& p, const cuda::BackwardWorkspace& ws,
                           const cuda::BackwardSchedule& schedule, typename Traits::Smem& smem) {
  using Stream = cuda::QueryStream<Traits::kBlockM, Traits::kBlockN, Policy, Traits::kStaggered>;
  const bool leads = !kRagged || threadIdx.x % 32 == 0;
  unsigned works = 0, steps = 0;  // so far
  [[maybe_unused]] unsigned taken = 0;
  auto tell = [&](const BackwardWork& work) { smem.work_ring.tell(smem.work, works++, work); };
  // The first is that of the block's index, or the cluster's, and the next is taken before work on one begins, so that
  // nobody waits for the counter. Not so where blocks wait for each other (turn_order.h): only a block that runs may
  // take work, and it soon begins what it has taken: all but the last kStepsLeft steps of the work before have been
  // read.
  const bool ahead = !p.deterministic;
  constexpr unsigned kStepsLeft = 2;
  const ClearedTickets tickets{ws.next_work};
  const int workers = gridDim.x / Traits::kClusterSize;  // a cluster's CTAs take the same work
  auto take = [&]() -> int {
    if (!leads) return 0;
    auto draw = [&] { return workers + tickets.draw(); };
    if constexpr (Traits::kClusterSize > 1) return smem.next_index.next(taken++, draw);
    if (ahead) return draw();
    smem.plan_ring.wait_empty(RingSlot<kPlannedSteps>::after(steps + kPlannedSteps - 1 - kStepsLeft));
    return tickets.draw();
  };
  cuda::RaggedTiles<cuda::TilesOf::kKeys> ragged(p, Traits::kBlockN);
  const int count = static_cast<int>(schedule.size());
  auto find = [&](int index, cuda::TileWork& work) -> bool {
    if constexpr (kRagged) {
      cuda::SequenceTile tile;
      if (!ragged.find(__shfl_sync(0xffffffffu, index, 0), tile)) return false;
      work = schedule.of_sequence(tile.blocks).work(tile.index);
      work.batch = tile.batch;
    } else {
      if (index >= count) return false;
      work = schedule.work(index);
    }
    return true;
  };
  cuda::TileWork work;
  for (int index = ahead ? blockIdx.x / Traits::kClusterSize : take(), next_index = 0; find(index, work);
       index = ahead ? next_index : take()) {
    if (!leads) continue;
    if (ahead) next_index = take();
    const SeqlenInfo seq(p, work.batch);
    const std::int64_t first_tile = ws.first_tile<Traits::kBlockM>(p, seq, work.batch);
    Stream stream(p, seq, work);
    typename Stream::Item item, next;
    bool more = stream.next(item);
    tell({work, more, false});
    for (; more; item = next) {
      more = stream.next(next);
      const int turn = p.deterministic ? stream.turn(item) : 0;
      const auto tile = static_cast<int>(item.head * ws.tiles_per_head + first_tile + item.tile.index);
      // tell(), but what it tells is made when there is room: this warp has few registers.
      const auto slot = RingSlot<kPlannedSteps>::after(steps++);
      smem.plan_ring.wait_empty(slot);
      smem.plan.of(slot) = {{item.head, item.tile.index, item.tile.partial, !more}, tile, turn};
      smem.plan_ring.arrive_full(slot);
    }
  }
  if (leads) tell({{}, false, true});
}

// One thread: loads Q, dO, K and V, those of a new key tile in the order in which their places become free: K first
// where it has two, else last, as it is needed until the last dQ.
template <class Traits, bool kRagged>
__device__ void load_operands(const BackwardParams& p, const BackwardMaps& maps, const cuda::BackwardWorkspace& ws,
                              typename Traits::Smem& smem) {
  using SmemQ = typename Traits::SmemQ;
  using SmemDo = typename Traits::SmemDo;
  unsigned steps = 0, key_tiles = 0;
  for_each_work<Traits>(smem, [&](const BackwardWork& work) {
    if (work.visited) {
      const SeqlenInfo seq(p, work.tile.batch);
      const int batch = kRagged ? batch_in_tensors(p, work.tile.batch) : work.tile.batch;
      auto load_k = [&] {
        if constexpr (Traits::kClusterSize > 1)
          load_pair_keys<Traits>(maps.k, smem, key_tiles, work.tile, seq, batch);
        else
          load_keys<typename Traits::SmemK, Traits>(maps.k, smem.k_ring, key_tiles, smem.k, work.tile, seq, batch);
      };
      if (Traits::kKeysAhead) load_k();
      bool first = true;
      for_each_step<Traits>(smem, steps, [&](const PlannedStep& planned) {
        const TileOrigin at{seq.offset_q + planned.step.m_block * Traits::kBlockM, planned.step.head, batch};
        const auto q = RingSlot<Traits::kStagesQ>::after(steps);
        smem.q_ring.wait_empty(q);
        smem.step[q.stage] = planned.step;
        if constexpr (Traits::kClusterSize > 1) smem.tile[q.stage] = planned.tile;
        load_queries<SmemQ, Traits::kClusterSize>(maps.q, smem.q_ring.full[q.stage],
                                                  smem.q + q.stage * SmemQ::kElements, at,
                                                  &ws.lse_of<Traits::kBlockM>(planned.tile), smem.lse[q.stage]);
        const auto dout = RingSlot<Traits::kStagesDo>::after(steps);
        smem.dout_ring.wait_empty(dout);
        load_queries<SmemDo, Traits::kClusterSize>(
            maps.dout, smem.dout_ring.full[dout.stage], smem.dout + dout.stage * SmemDo::kElements, at,
            ws.minus_delta + std::int64_t{planned.tile} * Traits::kBlockM, smem.minus_delta[dout.stage]);
        if (first) {
          load_keys<typename Traits::SmemV, Traits>(maps.v, smem.v_ring, key_tiles, smem.v, work.tile, seq, batch);
          if (!Traits::kKeysAhead) load_k();
          ++key_tiles;
          first = false;
        }
      });
    }
  });
}

// What one thread does with the dQ that warpgroups leave in shared memory: it brings each piece to dq_accum.
template <class Traits>
class DqAdder {
 public:
  __device__ DqAdder(const cuda::BackwardWorkspace& ws, typename Traits::Smem& smem, int warp)
      : ws_(ws), smem_(smem), warp_(warp) {}

  // The pieces of the warpgroup with this warp's number. step: how many were before.
  __device__ void add(int tile, unsigned step) const {
    for (int i = 0; i < kPieces; ++i) {
      const FirstWriter first(ws_.dq_order + piece_of(tile, warp_, i));
      bool adds = Traits::kClearsDq || first.has_written();  // asked before there is something to add
      smem_.dq_ring[warp_].wait_full(slot_of(step, i));
      if (!adds) adds = !first.claim();
      write(tile, warp_, step, i, adds);
      if (!adds) first.publish();
    }
  }

  // The same when a key tile's turn has come (turn_order.h). To see a turn, to add and to pass the turn on takes longer
  // than a step. So the warps alternate, and each adds all pieces of every second step:
  //   warp 0   step 0: add │ step 2, whose turn is there: add, and pass on that of step 0 beside it
  //                        │ step 2, whose turn is not:   pass on that of step 0, wait, add
  //   warp 1         step 1: …                            step 3: …
  // Passed on late, a turn costs no wait for what it added to arrive.
  __device__ void add_in_turn(int tile, unsigned step, int mine) {
    if (step % Traits::kWarpgroups != static_cast<unsigned>(warp_)) return;
    int* const taken = ws_.dq_order + piece_of(tile, 0, 0);
    const auto slot = slot_of(step, 0);
    bool come = InTurn::has_come(taken, mine);
    if (!come || !smem_.dq_ring[kEarlier].full[slot.stage].test_wait(slot.phase))
      turn_.pass<0>();  // nothing else to do
    while (!come) come = InTurn::has_come(taken, mine);
    after_acquire();
    for (int n = 0; n < Traits::kWarpgroups; ++n) {
      const int warpgroup = (kEarlier + n) % Traits::kWarpgroups;
      for (int i = 0; i < kPieces; ++i) {
        smem_.dq_ring[warpgroup].wait_full(slot_of(step, i));
        write(tile, warpgroup, step, i, true);
      }
      if (n == 0) turn_.pass<kPieces>();  // of its last step; above head_dim 128 the other pieces come a step later
    }
    turn_.hold(taken, mine);
  }
  // After the last step of a key tile.
  __device__ void finish_turns() { turn_.pass<0>(); }

 private:
  static constexpr int kPieces = Traits::kDqPieces / Traits::kWarpgroups;  // of a step, for each warpgroup
  static constexpr int kEarlier = Traits::kWide ? 1 : 0;  // the warpgroup whose dQ of a step does not come later

  __device__ static std::int64_t piece_of(int tile, int warpgroup, int i) {
    return std::int64_t{tile} * Traits::kDqPieces + warpgroup * kPieces + i;
  }
  __device__ static auto slot_of(unsigned step, int i) {
    return RingSlot<Traits::kDqPieces>::after(step * kPieces + i);
  }
  __device__ __forceinline__ void write(int tile, int warpgroup, unsigned step, int i, bool adds) const {
    bulk_write(ws_.dq_accum + piece_of(tile, warpgroup, i) * Traits::kDqElements, smem_.dq[warpgroup],
               Traits::kDqElements * static_cast<int>(sizeof(float)), adds);
    smem_.dq_ring[warpgroup].release(slot_of(step, i), 0);
  }

  const cuda::BackwardWorkspace& ws_;
  typename Traits::Smem& smem_;
  int warp_;
  InTurn turn_;
};

// One thread of a cluster's CTA: sends dS of its keys to the other CTA, whose warpgroups need it for dQ.
template <class Traits>
__device__ void send_ds(typename Traits::Smem& smem) {
  using Tile = typename Traits::SmemScores;
  constexpr int kSlab = Tile::kElements / Tile::kSlabs;
  unsigned steps = 0;
  for_each_work<Traits>(smem, [&](const BackwardWork& work) {
    if (!work.visited) return;
    for_each_step<Traits>(smem, steps, [&](const PlannedStep&) {
      const auto slot = RingSlot<Traits::kStagesDs>::after(steps);
      smem.own_ds_ring.wait_full(slot);
      // Of the other's, which may be there already: see load_shared_tile().
      smem.ds_ring.expect(slot, Tile::kSlabBytes);
      auto* slab = smem.ds + slot.stage * Tile::kElements;
      copy_to_peer(slab + kSlab, slab, Tile::kSlabBytes, smem.ds_ring.full[slot.stage]);
    });
  });
}

// One thread of each of the warps that add.
template <class Traits>
__device__ void add_dq(const BackwardParams& p, const cuda::BackwardWorkspace& ws, typename Traits::Smem& smem,
                       int warp) {
  DqAdder<Traits> adder(ws, smem, warp);
  unsigned steps = 0;
  for_each_work<Traits>(smem, [&](const BackwardWork& work) {
    if (work.visited) {
      for_each_step<Traits>(smem, steps, [&](const PlannedStep& planned) {
        if (p.deterministic)
          adder.add_in_turn(planned.tile, steps, planned.turn);
        else
          adder.add(planned.tile, steps);
      });
      adder.finish_turns();
    }
  });
}

}  // namespace flashsdk::sm90
