// The roles of the SM90 backward that do not compute: one warp loads, one warp a computing warpgroup adds to dq_accum.
#pragma once

#include "cuda/backward_stream.h"
#include "cuda/backward_workspace.h"
#include "sm90/backward_traits.h"
#include "sm90/tma.h"

namespace flashsdk::sm90 {

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

template <class Traits, class Policy>
using QueryStream = cuda::QueryStream<Traits::kBlockM, Traits::kBlockN, Policy, true>;

// One thread. Takes key tiles off the schedule and streams the queries that see them.
template <class Traits, class Policy>
class BackwardLoader {
 public:
  __device__ BackwardLoader(const BackwardParams& p, const BackwardMaps& maps, const cuda::BackwardWorkspace& ws,
                            typename Traits::Smem& smem)
      : p_(p), maps_(maps), ws_(ws), smem_(smem) {}

  __device__ void run(const cuda::TileSchedule& schedule) {
    const int count = schedule.num_blocks * schedule.heads_total;
    int next = blockIdx.x;
    while (next < count) {
      const cuda::TileWork work = schedule.work(next);
      next = gridDim.x + atomicAdd(ws_.next_work, 1);
      const SeqlenInfo seq(p_, work.batch);
      if (work.block * Traits::kBlockN < seq.seqlen_k) load(work, seq);
    }
    tell({{}, false, true});
  }

 private:
  using Stream = QueryStream<Traits, Policy>;
  using Element = typename Traits::Element;

  __device__ void tell(const BackwardWork& work) {
    const auto use = nth_use<2>(works_++);
    smem_.full_work.wait_empty(use);
    smem_.work[use.stage] = work;
    smem_.full_work.arrive_full(use);
  }

  __device__ void load(const cuda::TileWork& work, const SeqlenInfo& seq) {
    Stream stream(p_, seq, work);
    typename Stream::Item item, next;
    bool more = stream.next(item);
    tell({work, more, false});
    for (bool first = true; more; first = false) {
      more = stream.next(next);
      load_q(work, seq, item, !more);
      if (first) load_keys<typename Traits::SmemK>(maps_.k, smem_.full_k, smem_.k, work, seq);
      load_dout(work, seq, item);
      if (first) {
        load_keys<typename Traits::SmemV>(maps_.v, smem_.full_v, smem_.v, work, seq);
        ++key_loads_;
      }
      ++steps_;
      item = next;
    }
  }

  __device__ int batch_of_map(const cuda::TileWork& work) const { return p_.cu_seqlens_q != nullptr ? 0 : work.batch; }
  __device__ TileOrigin origin(const cuda::TileWork& work, const SeqlenInfo& seq,
                               const typename Stream::Item& item) const {
    return {seq.offset_q + item.tile.index * Traits::kBlockM, item.head, batch_of_map(work)};
  }
  __device__ std::int64_t row_of(const cuda::TileWork& work, const SeqlenInfo& seq,
                                 const typename Stream::Item& item) const {
    return ws_.tile(p_, seq, work.batch, item.head, item.tile.index) * Traits::kBlockM;
  }

  static constexpr int kRowBytes = Traits::kBlockM * static_cast<int>(sizeof(float));

  __device__ void load_q(const cuda::TileWork& work, const SeqlenInfo& seq, const typename Stream::Item& item,
                         bool last) {
    using Tile = typename Traits::SmemQ;
    const auto use = nth_use<Traits::kStages>(steps_);
    smem_.full_q.wait_empty(use);
    const bool cut = p_.cu_seqlens_q != nullptr && (item.tile.index + 1) * Traits::kBlockM > seq.seqlen_q;
    smem_.step[use.stage] = {item.head, item.tile.index, item.tile.partial, cut, last};
    smem_.full_q.announce(use, Tile::kBytes + kRowBytes);
    auto& barrier = smem_.full_q.full[use.stage];
    load_tile<Tile>(maps_.q, barrier, smem_.q + use.stage * Tile::kElements, origin(work, seq, item));
    cute::SM90_BULK_COPY_G2S::copy(ws_.lse_log2 + row_of(work, seq, item), reinterpret_cast<std::uint64_t*>(&barrier),
                                   smem_.lse_log2[use.stage], kRowBytes);
  }

  __device__ void load_dout(const cuda::TileWork& work, const SeqlenInfo& seq, const typename Stream::Item& item) {
    using Tile = typename Traits::SmemDo;
    const auto use = nth_use<Traits::kStages>(steps_);
    smem_.full_do.wait_empty(use);
    smem_.full_do.announce(use, Tile::kBytes + kRowBytes);
    auto& barrier = smem_.full_do.full[use.stage];
    load_tile<Tile>(maps_.dout, barrier, smem_.dout + use.stage * Tile::kElements, origin(work, seq, item));
    cute::SM90_BULK_COPY_G2S::copy(ws_.delta + row_of(work, seq, item), reinterpret_cast<std::uint64_t*>(&barrier),
                                   smem_.delta[use.stage], kRowBytes);
  }

  template <class Tile>
  __device__ void load_keys(const CUtensorMap& map, Ring<Traits::kKeyBuffers>& ring, Element* smem,
                            const cuda::TileWork& work, const SeqlenInfo& seq) {
    const auto use = nth_use<Traits::kKeyBuffers>(key_loads_);
    ring.wait_empty(use);
    ring.announce(use, Tile::kBytes);
    load_tile<Tile>(map, ring.full[use.stage], smem + use.stage * Tile::kElements,
                    {seq.offset_k + work.block * Traits::kBlockN, work.head, batch_of_map(work)});
  }

  const BackwardParams& p_;
  const BackwardMaps& maps_;
  const cuda::BackwardWorkspace& ws_;
  typename Traits::Smem& smem_;
  unsigned works_ = 0, steps_ = 0, key_loads_ = 0;  // so far
};

// What every other role does: f(work) for each key tile of this thread block.
template <class Traits, class F>
__device__ void for_each_work(typename Traits::Smem& smem, F&& f) {
  for (unsigned n = 0;; ++n) {
    const auto use = nth_use<2>(n);
    smem.full_work.wait_full(use);
    const BackwardWork work = smem.work[use.stage];
    __syncwarp();
    smem.full_work.release(use);
    if (work.stop) return;
    f(work);
  }
}

// global += shared, in fp32, by the copy engine.
__device__ __forceinline__ void bulk_add(float* global, const float* shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(cute::cast_smem_ptr_to_uint(shared)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// One thread. Adds what its warpgroup leaves in shared memory to dq_accum. In a deterministic call key tiles take turns
// at each tile of queries, in ascending order; a thread block waits only for ones that began before it.
template <class Traits, class Policy>
__device__ void add_dq(const BackwardParams& p, const cuda::BackwardWorkspace& ws, typename Traits::Smem& smem,
                       int warpgroup) {
  unsigned steps = 0;
  for_each_work<Traits>(smem, [&](const BackwardWork& work) {
    const SeqlenInfo seq(p, work.tile.batch);
    QueryStream<Traits, Policy> stream(p, seq, work.tile);
    typename QueryStream<Traits, Policy>::Item item;
    while (threadIdx.x % 32 == 0 && stream.next(item)) {
      const std::int64_t piece =
          ws.tile(p, seq, work.tile.batch, item.head, item.tile.index) * Traits::kDqPieces + warpgroup;
      const auto use = nth_use<1>(steps++);
      auto& ring = smem.full_dq[warpgroup];
      ring.wait_full(use);
      volatile int* turn = ws.turn + piece;
      if (p.deterministic) {
        Policy policy(p.mask, seq, work.tile.batch, item.head);
        const int rank =
            policy.row_walk(flashsdk::Tile{Traits::kBlockM, Traits::kBlockN}, item.tile.index).rank_of(work.tile.block);
        while (*turn != rank) {
        }
        __threadfence();
        asm volatile("fence.proxy.async;" ::: "memory");  // from here on also for the copy engine
      }
      bulk_add(ws.dq_accum + piece * Traits::kDqElements, smem.dq[warpgroup], Traits::kDqElements * sizeof(float));
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      ring.release(use);
      if (p.deterministic) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __threadfence();
        *turn = *turn + 1;
      }
    }
    __syncwarp();
  });
}

}  // namespace flashsdk::sm90
