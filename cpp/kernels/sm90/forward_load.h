// The loading warp of the forward: walks the tiles that the mask policy visits and keeps the rings of Q, K and V full.
#pragma once

#include <cutlass/arch/barrier.h>

#include "common/kernel_entry.h"
#include "sm90/forward_schedule.h"
#include "sm90/forward_traits.h"
#include "sm90/tma.h"

namespace flashsdk::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
};

// All 32 lanes run it alike; one starts the copies.
//
// The tiles of all its work make one stream, and K runs one tile ahead of V in it, across the borders between queries
// too: K₀ Q K₁ V₀ K₂ V₁ … is the order in which the warpgroups that compute need them.
template <class Traits, class Policy>
class ForwardLoader {
  using Smem = typename Traits::Smem;

 public:
  __device__ ForwardLoader(const ForwardParams& p, const ForwardMaps& maps, Smem& smem)
      : p_(p), maps_(maps), smem_(smem), leader_(threadIdx.x % 32 == 0) {}

  __device__ void run(WorkStream stream) {
    for (cuda::TileWork work; stream.next(work);) {
      const SeqlenInfo seq(p_, work.batch);
      if (work.block * Traits::kBlockM < seq.seqlen_q) load_work(work, seq);
    }
    load_pending_values();
    k_ring().wait_empty(k_state_);
    if (leader_) {
      smem_.tiles[slot_.stage] = KeyTile{};  // the end
      k_ring().arrive_full(k_state_);
    }
  }

 private:
  __device__ void load_work(const cuda::TileWork& work, const SeqlenInfo& seq) {
    const Policy policy(p_.mask, seq, work.batch, work.head);
    TileWalk walk = policy.row_walk(flashsdk::Tile{Traits::kBlockM, Traits::kBlockN}, work.block);
    const bool packed = p_.cu_seqlens_q != nullptr;
    const int batch = packed ? 0 : work.batch;

    TileRef tile{0, false};
    // Queries that see nothing get one tile without a key: their output is written like any other.
    const int key_end = walk.next(tile) ? seq.seqlen_k : 0;
    for (bool first = true, more = true; more; first = false) {
      TileRef next{0, false};
      more = key_end > 0 && walk.next(next);
      const int n0 = tile.index * Traits::kBlockN;
      const bool cut = n0 + Traits::kBlockN > key_end;
      const int flags = (first ? KeyTile::kFirst : 0) | (more ? 0 : KeyTile::kLast) |
                        (tile.partial ? KeyTile::kPartial : 0) | (tile.partial || cut ? KeyTile::kMasked : 0);
      const TileOrigin at{seq.offset_k + n0, work.head / p_.heads_per_group(), batch};
      load_keys(KeyTile{flags, n0, key_end, work.block, work.head, work.batch}, at);
      load_pending_values();
      pending_ = {at, packed && cut ? max_of(0, key_end - n0) : Traits::kBlockN, true};
      if (first) load_queries({seq.offset_q + work.block * Traits::kBlockM, work.head, batch});
      tile = next;
    }
  }

  __device__ void load_keys(const KeyTile& tile, TileOrigin at) {
    k_ring().wait_empty(k_state_);
    if (leader_) {
      smem_.tiles[slot_.stage] = tile;
      k_ring().announce(k_state_, Traits::SmemK::kBytes);
      load_tile<typename Traits::SmemK>(maps_.k, k_ring().full[k_state_.stage],
                                        smem_.k + k_state_.stage * Traits::SmemK::kElements, at);
    }
    k_state_.advance();
    slot_.advance();
  }

  __device__ void load_queries(TileOrigin at) {
    smem_.q_ring.wait_empty(q_state_);
    if (leader_) {
      smem_.q_ring.announce(q_state_, Traits::SmemQ::kBytes);
      load_tile<typename Traits::SmemQ>(maps_.q, smem_.q_ring.full[q_state_.stage],
                                        smem_.q + q_state_.stage * Traits::SmemQ::kElements, at,
                                        CacheHint::EVICT_FIRST);
    }
    q_state_.advance();
  }

  __device__ void load_pending_values() {
    if (!pending_.exists) return;
    auto& ring = smem_.v_ring;
    ring.wait_empty(v_state_);
    auto* buffer = smem_.v + v_state_.stage * Traits::SmemV::kElements;
    if (pending_.rows == Traits::kBlockN) {
      if (leader_) {
        ring.announce(v_state_, Traits::SmemV::kBytes);
        load_tile<typename Traits::SmemV>(maps_.v, ring.full[v_state_.stage], buffer, pending_.at);
      }
    } else {
      load_cut_values(buffer);
      if (leader_) ring.arrive_full(v_state_);
    }
    v_state_.advance();
    pending_.exists = false;
  }

  // The last rows of the box belong to the next packed sequence. Their probabilities are 0, but 0·inf is NaN: clear them
  // before anyone else sees the buffer.
  __device__ void load_cut_values(typename Traits::Element* buffer) {
    using Tile = typename Traits::SmemV;
    if (leader_) {
      smem_.tail.arrive_and_expect_tx(Tile::kBytes);
      load_tile<Tile>(maps_.v, smem_.tail, buffer, pending_.at);
    }
    smem_.tail.wait(tail_phase_);
    tail_phase_ ^= 1;
    constexpr int kVectorsPerRow = Tile::kSlabBytes / Tile::kRows / 16;
    for (int slab = 0; slab < Tile::kSlabs; ++slab) {
      auto* vectors = reinterpret_cast<uint4*>(reinterpret_cast<char*>(buffer) + slab * Tile::kSlabBytes);
      for (int i = pending_.rows * kVectorsPerRow + threadIdx.x % 32; i < Tile::kRows * kVectorsPerRow; i += 32)
        vectors[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

  __device__ Ring<Traits::kStages>& k_ring() { return smem_.k_ring; }

  struct PendingValues {
    TileOrigin at;
    int rows;  // that belong to the sequence
    bool exists;
  };

  const ForwardParams& p_;
  const ForwardMaps& maps_;
  Smem& smem_;
  bool leader_;
  RingState<Traits::kQueryStages> q_state_;
  RingState<Traits::kStages> k_state_, v_state_;
  RingState<Traits::kTileSlots> slot_;
  PendingValues pending_{{0, 0, 0}, 0, false};
  std::uint32_t tail_phase_ = 0;
};

}  // namespace flashsdk::sm90
