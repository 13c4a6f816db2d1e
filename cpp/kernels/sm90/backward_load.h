// The roles of the SM90 backward that do not compute, one warp each, of which one thread works: two load, and one for
// each computing warpgroup adds to dq_accum. All walk the same queries.
#pragma once

#include "cuda/backward_stream.h"
#include "cuda/backward_workspace.h"
#include "sm90/backward_traits.h"
#include "sm90/tma.h"

namespace flashsdk::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

// What every role but the first does, by whole warps or by one thread: f(work) for each key tile of this thread block.
template <class Traits, bool kWarps, class F>
__device__ void for_each_work(typename Traits::Smem& smem, F&& f) {
  for (unsigned n = 0;; ++n) {
    const auto use = RingState<2>::after(n);
    smem.full_work.wait_full(use);
    const BackwardWork work = smem.work[use.stage];
    if constexpr (kWarps) __syncwarp();
    smem.full_work.release(use);
    if (work.stop) return;
    f(work);
  }
}

// The queries that see a tile of keys, and where they lie.
template <class Traits, class Policy>
class BackwardWalk {
 public:
  using Stream = cuda::QueryStream<Traits::kBlockM, Traits::kBlockN, Policy, Traits::kStaggered>;
  using Item = typename Stream::Item;

  __device__ BackwardWalk(const BackwardParams& p, const cuda::BackwardWorkspace& ws, const SeqlenInfo& seq,
                          const cuda::TileWork& work)
      : stream_(p, seq, work),
        tiles_per_head_(ws.tiles_per_head),
        first_tile_(ws.first_tile(p, seq, work.batch)),
        first_row_(seq.offset_q),
        batch_(p.cu_seqlens_q != nullptr ? 0 : work.batch) {}

  __device__ bool next(Item& item) { return stream_.next(item); }
  // In the workspace, and in q and dout.
  __device__ std::int64_t tile(const Item& item) const {
    return item.head * tiles_per_head_ + first_tile_ + item.tile.index;
  }
  __device__ TileOrigin origin(const Item& item) const {
    return {first_row_ + item.tile.index * Traits::kBlockM, item.head, batch_};
  }

 private:
  Stream stream_;
  std::int64_t tiles_per_head_, first_tile_;
  int first_row_, batch_;
};

// One thread: Q and lse, or dO and delta, of the next step. The barrier is told of their bytes.
template <class Tile, class Element, int kRows>
__device__ __forceinline__ void load_queries(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& barrier,
                                             Element* smem, TileOrigin at, const float* rows,
                                             float (&smem_rows)[kRows]) {
  constexpr int kRowBytes = kRows * static_cast<int>(sizeof(float));
  barrier.arrive_and_expect_tx(Tile::kBytes + kRowBytes);
  load_tile<Tile>(map, barrier, smem, at);
  cute::SM90_BULK_COPY_G2S::copy(rows, reinterpret_cast<std::uint64_t*>(&barrier), smem_rows, kRowBytes);
}

// One thread: a tile of K or V, when its place is free.
template <class Tile, class Traits>
__device__ __forceinline__ void load_keys(const BackwardParams& p, const CUtensorMap& map,
                                          Ring<Traits::kKeyBuffers>& ring, unsigned n, typename Traits::Element* smem,
                                          const cuda::TileWork& work, const SeqlenInfo& seq) {
  const auto use = RingState<Traits::kKeyBuffers>::after(n);
  ring.wait_empty(use);
  ring.announce(use, Tile::kBytes);
  load_tile<Tile>(map, ring.full[use.stage], smem + use.stage * Tile::kElements,
                  {seq.offset_k + work.block * Traits::kBlockN, work.head, p.cu_seqlens_k != nullptr ? 0 : work.batch});
}

// Takes key tiles off the schedule, tells all what comes, and loads Q and K.
template <class Traits, class Policy>
__device__ void load_q_and_k(const BackwardParams& p, const BackwardMaps& maps, const cuda::BackwardWorkspace& ws,
                             const cuda::TileSchedule& schedule, typename Traits::Smem& smem) {
  using Tile = typename Traits::SmemQ;
  unsigned works = 0, steps = 0, key_tiles = 0;  // so far
  auto tell = [&](const BackwardWork& work) {
    const auto use = RingState<2>::after(works++);
    smem.full_work.wait_empty(use);
    smem.work[use.stage] = work;
    smem.full_work.arrive_full(use);
  };
  const int count = static_cast<int>(schedule.size());
  for (int index = blockIdx.x; index < count;) {
    const cuda::TileWork work = schedule.work(index);
    index = gridDim.x + atomicAdd(ws.next_work, 1);
    const SeqlenInfo seq(p, work.batch);
    if (work.block * Traits::kBlockN >= seq.seqlen_k) continue;
    BackwardWalk<Traits, Policy> walk(p, ws, seq, work);
    typename BackwardWalk<Traits, Policy>::Item item, next;
    bool more = walk.next(item);
    tell({work, more, false});
    for (bool first = true; more; first = false) {
      more = walk.next(next);
      const auto use = RingState<Traits::kQueryStages>::after(steps++);
      smem.full_q.wait_empty(use);
      smem.step[use.stage] = {item.head, item.tile.index, item.tile.partial, !more};
      load_queries<Tile>(maps.q, smem.full_q.full[use.stage], smem.q + use.stage * Tile::kElements, walk.origin(item),
                         ws.lse_of(walk.tile(item)), smem.lse_log2[use.stage]);
      if (first) load_keys<typename Traits::SmemK, Traits>(p, maps.k, smem.full_k, key_tiles++, smem.k, work, seq);
      item = next;
    }
  }
  tell({{}, false, true});
}

// One thread: loads dO and V.
template <class Traits, class Policy>
__device__ void load_dout_and_v(const BackwardParams& p, const BackwardMaps& maps, const cuda::BackwardWorkspace& ws,
                                typename Traits::Smem& smem) {
  using Tile = typename Traits::SmemDo;
  unsigned steps = 0, key_tiles = 0;
  for_each_work<Traits, false>(smem, [&](const BackwardWork& work) {
    if (work.visited) {
      const SeqlenInfo seq(p, work.tile.batch);
      BackwardWalk<Traits, Policy> walk(p, ws, seq, work.tile);
      load_keys<typename Traits::SmemV, Traits>(p, maps.v, smem.full_v, key_tiles++, smem.v, work.tile, seq);
      for (typename BackwardWalk<Traits, Policy>::Item item; walk.next(item);) {
        const auto use = RingState<Traits::kStages>::after(steps++);
        smem.full_do.wait_empty(use);
        load_queries<Tile>(maps.dout, smem.full_do.full[use.stage], smem.dout + use.stage * Tile::kElements,
                           walk.origin(item), ws.minus_delta + walk.tile(item) * Traits::kBlockM,
                           smem.minus_delta[use.stage]);
      }
    }
  });
}

// global += shared, in fp32, by the copy engine.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// One thread: adds what a warpgroup leaves in shared memory to dq_accum. In a deterministic call key tiles take turns at
// each tile of queries, in ascending order; a thread block waits only for ones whose work was taken earlier.
template <class Traits, class Policy>
__device__ void add_dq(const BackwardParams& p, const cuda::BackwardWorkspace& ws, typename Traits::Smem& smem,
                       int warpgroup) {
  constexpr int kPieces = Traits::kDqPieces / Traits::kWarpgroups;  // of a step
  constexpr int kBytes = Traits::kDqElements * static_cast<int>(sizeof(float));
  unsigned pieces = 0;
  auto& ring = smem.full_dq[warpgroup];
  for_each_work<Traits, false>(smem, [&](const BackwardWork& work) {
    if (work.visited) {
      const SeqlenInfo seq(p, work.tile.batch);
      BackwardWalk<Traits, Policy> walk(p, ws, seq, work.tile);
      for (typename BackwardWalk<Traits, Policy>::Item item; walk.next(item);) {
        int rank = 0;
        if (p.deterministic) {
          Policy policy(p.mask, seq, work.tile.batch, item.head);
          rank = policy.row_walk(flashsdk::Tile{Traits::kBlockM, Traits::kBlockN}, item.tile.index)
                     .rank_of(work.tile.block);
        }
        const std::int64_t first = walk.tile(item) * Traits::kDqPieces + warpgroup * kPieces;
        for (std::int64_t piece = first; piece < first + kPieces; ++piece) {
          volatile int* turn = ws.turn + piece;
          if (p.deterministic) {
            while (*turn != rank) {
            }
            __threadfence();
            asm volatile("fence.proxy.async;" ::: "memory");  // from here on also for the copy engine
          }
          const auto use = RingState<1>::after(pieces++);
          ring.wait_full(use);
          bulk_add(ws.dq_accum + piece * Traits::kDqElements, smem.dq[warpgroup], kBytes);
          asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          ring.release(use);
          if (p.deterministic) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            __threadfence();
            *turn = *turn + 1;
          }
        }
      }
    }
  });
}

}  // namespace flashsdk::sm90
