// The loading warps of the forward: keep the rings of Q, K and V full.
#pragma once

#include <numeric>

#include <cutlass/arch/barrier.h>

#include "common/kernel_entry.h"
#include "cuda/tile/builtin_policy.h"
#include "cuda/tile/math.h"
#include "cuda/tile/score_features.h"
#include "sm90/forward/schedule.h"
#include "sm90/forward/traits.h"
#include "sm90/tma.h"

namespace flashsdk::sm90 {

struct ForwardMaps {
  CUtensorMap q, k, v;
  int key_rows;  // of a box of K and V: see rows_of_box()
};

// Keys of a tile that lie in one page whatever the page: a box of the copy engine. Without pages, all.
constexpr int rows_of_box(const PageParam& pages, int tile_keys) {
  return pages.table == nullptr ? tile_keys : std::gcd(pages.size, tile_keys);
}

// The queries of one tile, the one after `work` others. By a whole warp, of which the leader copies.
template <class Traits>
__device__ void load_queries(const ForwardMaps& maps, typename Traits::Smem& smem, unsigned work, TileOrigin at,
                             bool leader) {
  const auto slot = RingSlot<Traits::kStagesQ>::after(work);
  smem.q_ring.wait_empty(slot);
  if (!leader) return;
  smem.q_ring.expect(slot, Traits::SmemQ::kBytes);
  load_tile<typename Traits::SmemQ>(maps.q, smem.q_ring.full[slot.stage],
                                    smem.q + slot.stage * Traits::SmemQ::kElements, at, CacheHint::EVICT_FIRST);
}

// Rows behind these no tensor has: the copy engine gives zeros.
constexpr int kBehindAll = 1 << 30;

// What one lane copies of a tile of K or V: a box of a page, or the first lane all of the tile.
struct KeyBox {
  int first;  // row of the tile
  TileOrigin at;

  template <class kTile>
  __device__ void load(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& barrier, void* smem) const {
    if (first < kTile::kRows) load_box<kTile>(map, barrier, smem, first, at);
  }
};
// Asked before there is room for the keys, as a table lies in memory.
template <int kTileKeys>
__device__ KeyBox box_of_lane(const PageParam& pages, int box_rows, const ForwardStep& tile, int head, int batch) {
  KeyBox box{static_cast<int>(threadIdx.x) % 32 * box_rows, {tile.row, head, batch}};
  if (pages.table != nullptr && box.first < kTileKeys) {
    const int key = tile.n0 + box.first;
    const bool used = box.first < tile.rows;  // of keys that are not there, nobody asks where
    box.at.row = used ? key % pages.size : kBehindAll;
    box.at.batch = used ? pages.table[batch * pages.batch + key / pages.size] : 0;
  }
  return box;
}

// Two warps load, each of them 32 lanes that run alike, of which one starts the copies. The first walks the tiles that
// the mask policy visits, tells them to the others and loads K; the second follows what it tells and loads V. One warp
// alone would need longer for a tile than the tensor cores do. Which of them loads Q is a property of the tile.
//
// Under a band, tiles that are tried come outwards from one of which all queries see the first key: tried by a few
// keys' maximum, a first tile must not hide its first key, and rows of which it hides all have no maximum to try the
// next one by. With kFromLastBegunByAll it is the last such tile, mostly the diagonal's: what the mask costs then falls
// into a step that is long anyway. Else, and with a bool bias, it is the first.
//
// With ALiBi, and with a bias of numbers, which may be the same as a tensor, tiles that are tried and not listed come
// from the diagonal outwards: scores then fall with the distance, and a try by the maximum so far fails no more often
// than without. That goes before what a band asks for, of whose tile of the diagonal most queries see the first key.
template <class Traits, class Policy, cuda::Features kFeatures>
class KeyLoader {
  using Smem = typename Traits::Smem;
  using SmemK = typename Traits::SmemK;
  // ALiBi's tiles with keys on both sides of the diagonal are told like those that a mask cuts.
  static constexpr bool kTellsDiagonal = Traits::kTries && cuda::has_alibi(kFeatures);
  static constexpr bool kBiasAlone = cuda::has_bias_alone(kFeatures);
  static constexpr bool kOutward = kTellsDiagonal || (Traits::kTries && kBiasAlone);

 public:
  __device__ KeyLoader(const ForwardParams& p, const ForwardMaps& maps, Smem& smem)
      : p_(p), maps_(maps), smem_(smem), leader_(threadIdx.x % 32 == 0) {}

  __device__ void run(WorkStream stream) {
    for (cuda::TileWork work; stream.next(work); ++works_) {
      const SeqlenInfo seq(p_, work.batch);
      const Policy policy(p_.mask, seq, work.batch, work.head);
      ForwardWork of{
          Traits::first_query(work.block, seq.seqlen_q), work.head, work.batch, 0, cuda::diagonals_of(policy), seq};
      if constexpr (cuda::has_alibi(kFeatures))
        of.alibi_slope = cuda::AlibiAlone<kFeatures>::slope(p_.score, work.batch, work.head);
      const auto load = [&](TileWalk walk, auto is_band) {
        if constexpr (kOutward) {
          const int diagonal = diagonal_of(of) / Traits::kBlockN;
          OutwardWalk outward(walk, scores_fall() ? diagonal : walk.full_begin());
          load_work(of, outward, stream);
        } else if constexpr (Traits::kTries && is_band) {
          OutwardWalk outward(walk, origin_in_band(walk, of));
          load_work(of, outward, stream);
        } else {
          load_work(of, walk, stream);
        }
      };
      cuda::visit_row_walk<Traits::kFromEnd>(policy, flashsdk::Tile{Traits::kBlockM, Traits::kBlockN}, work.block,
                                             of.m0, load);
    }
    const auto slot = RingSlot<Traits::kStagesK>::after(tiles_);
    if (leader_) smem_.step_ring.tell(smem_.step, tiles_, {0, ForwardStep::kEnd, 0, 0});
    smem_.k_ring.wait_empty(slot);
    if (leader_) smem_.k_ring.arrive_full(slot);  // for those who wait for it to read the message
  }

 private:
  template <class Walk>
  __device__ void load_work(const ForwardWork& queries, Walk& walk, WorkStream& stream) {
    const int batch = batch_in_tensors(p_, queries.batch), head_kv = queries.head / p_.heads_per_group();
    TileRef tile{0, false};
    // Queries that see nothing get one tile without a key: their output is written like any other. The tile lies behind
    // all rows, where the copy engine gives zeros, as 0 times what K and V hold may be NaN.
    const int key_end = walk.next(tile) ? queries.sequence.seqlen_k : 0;
    const int row0 = key_end > 0 ? queries.sequence.offset_k : kBehindAll;
    // Told to all, this warp too, which has few registers.
    ForwardWork& of = smem_.work.of(works_);
    if (leader_) {
      of = queries;
      of.key_end = key_end;
    }
    __syncwarp();
    const int outside = Traits::kSkips ? of_each(is_outside(of)) * ForwardStep::kHidden : 0;
    for (bool first = true, more = true; more; first = false) {
      TileRef next{0, false};
      more = key_end > 0 && walk.next(next);
      if (!more) stream.draw();
      const int n0 = tile.index * Traits::kBlockN, rows = key_end - n0;
      int flags = outside;
      // Cut is the last tile, which may come first, else all is seen.
      cuda::branch_if(first || !more || tile.partial || (kOutward && is_special(of, n0, rows)), [&] {
        flags = (first ? ForwardStep::kFirst : 0) | (more ? 0 : ForwardStep::kLast) |
                (tile.partial ? ForwardStep::kPartial : 0) | what_is_seen(of, n0, tile.partial, first);
      });
      const auto slot = RingSlot<Traits::kStagesK>::after(tiles_);
      const ForwardStep step{n0, flags, row0 + n0, rows};
      if (leader_) smem_.step_ring.tell(smem_.step, tiles_, step);
      const KeyBox box = box_of_lane<Traits::kBlockN>(p_.pages, maps_.key_rows, step, head_kv, batch);
      smem_.k_ring.wait_empty(slot);
      if (leader_) smem_.k_ring.expect(slot, SmemK::kBytes);
      box.load<SmemK>(maps_.k, smem_.k_ring.full[slot.stage], smem_.k + slot.stage * SmemK::kElements);
      if constexpr (!Traits::kQueriesWithValues) {
        if (first) load_queries<Traits>(maps_, smem_, works_, {of.sequence.offset_q + of.m0, of.head, batch}, leader_);
      }
      ++tiles_;
      tile = next;
    }
  }

  // The flags that are of a warpgroup. For each of these a lane looks at its queries.
  __device__ static int what_is_seen(const ForwardWork& of, int n0, bool partial, bool first) {
    const int n1 = n0 + Traits::kBlockN;
    const bool cut = of.key_end < n1;
    const int first_row = first_of(of), last_row = first_row + kWarpgroupRows - 1;
    const bool outside = is_outside(of);
    bool hidden = outside, masked = cut || (kTellsDiagonal && has_diagonal(of, first_row, last_row, n0)),
         shows_first = n0 < of.key_end;
    if constexpr (!kHasDiagonals<Policy>) {
      masked |= partial;
      shows_first &= !partial;
    } else if (partial) {
      const KeyRange d = of.diagonals;
      hidden |= n0 >= last_row + d.end || n1 <= first_row + d.begin;
      masked |= n0 < last_row + d.begin || n1 > first_row + d.end;
      shows_first &= n0 >= last_row + d.begin && n0 < max_of(first_row, 0) + d.end;
    }
    return of_each(masked && !outside) * ForwardStep::kMasked | of_each(shows_first) * ForwardStep::kShowsFirst |
           of_each(Traits::kSkips && hidden && !first) * ForwardStep::kHidden;
  }
  // Whether scores may fall with the distance from the diagonal.
  __device__ bool scores_fall() const { return !kBiasAlone || p_.score.bias.dtype != DType::kBool; }
  // Of lengths that end together, as ALiBi is: the key there of the middle query; under a mask of the first, as all
  // warpgroups then see something of its tile where the band is of that diagonal, too. Else the walk has a tile nearby.
  __device__ int diagonal_of(const ForwardWork& of) const {
    const int query = p_.mask.kind == MaskKind::kDense ? of.m0 + Traits::kBlockM / 2 : max_of(of.m0, 0);
    return query + of.sequence.seqlen_k - of.sequence.seqlen_q;
  }
  // Where a walk along a band begins.
  __device__ static int origin_in_band(const TileWalk& walk, const ForwardWork& of) {
    return Traits::kFromLastBegunByAll ? last_tile_begun_by_all(walk, of.diagonals, of.m0, Traits::kBlockN)
                                       : walk.full_begin();
  }
  // Where tiles come in another order: cut, or with keys on both sides of the diagonal.
  __device__ static bool is_special(const ForwardWork& of, int n0, int rows) {
    return rows < Traits::kBlockN || (kTellsDiagonal && has_diagonal(of, of.m0, of.m0 + Traits::kBlockM - 1, n0));
  }
  __device__ static bool has_diagonal(const ForwardWork& of, int first_row, int last_row, int n0) {
    const int shift = of.sequence.seqlen_k - of.sequence.seqlen_q;
    return n0 < last_row + shift && n0 + Traits::kBlockN - 1 > first_row + shift;
  }
  static __device__ int first_of(const ForwardWork& of) { return of.m0 + threadIdx.x % 4 * kWarpgroupRows; }
  static __device__ bool is_outside(const ForwardWork& of) {
    return first_of(of) >= of.sequence.seqlen_q || first_of(of) + kWarpgroupRows <= 0;
  }
  static __device__ int of_each(bool warpgroups) { return __ballot_sync(0xffffffffu, warpgroups) & 0xf; }

  const ForwardParams& p_;
  const ForwardMaps& maps_;
  Smem& smem_;
  bool leader_;
  unsigned tiles_ = 0, works_ = 0;  // of keys, of queries: so far
};

// All its lanes arrive at the ring: each has read the message, whose slot is then used again.
template <class Traits>
class ValueLoader {
  using Smem = typename Traits::Smem;
  using SmemV = typename Traits::SmemV;

 public:
  __device__ ValueLoader(const ForwardParams& p, const ForwardMaps& maps, Smem& smem)
      : p_(p), maps_(maps), smem_(smem), leader_(threadIdx.x % 32 == 0) {}

  __device__ void run() {
    const bool goes_on = p_.ragged_keys();  // the tensor, behind the end of a sequence
    int head_kv = 0, batch = 0;
    for (unsigned index = 0, work = 0;; ++index) {
      const ForwardStep tile = smem_.step_ring.read(smem_.step, RingSlot<Traits::kSlots>::after(index));
      if (tile.has(ForwardStep::kEnd)) return;
      if (tile.has(ForwardStep::kFirst)) {
        const ForwardWork of = smem_.work.of(work);
        head_kv = of.head / p_.heads_per_group();
        batch = batch_in_tensors(p_, of.batch);
        if constexpr (Traits::kQueriesWithValues)
          load_queries<Traits>(maps_, smem_, work, {of.sequence.offset_q + of.m0, of.head, batch}, leader_);
        ++work;
      }
      const auto slot = RingSlot<Traits::kStagesV>::after(index);
      auto* buffer = smem_.v + slot.stage * SmemV::kElements;
      const KeyBox box = box_of_lane<Traits::kBlockN>(p_.pages, maps_.key_rows, tile, head_kv, batch);
      smem_.v_ring.wait_empty(slot);
      if (goes_on && tile.rows < Traits::kBlockN) {
        load_cut(buffer, box, max_of(0, tile.rows));
        smem_.v_ring.arrive_full(slot);
        continue;
      }
      if (leader_) smem_.v_ring.expect(slot, SmemV::kBytes);
      box.load<SmemV>(maps_.v, smem_.v_ring.full[slot.stage], buffer);
      if (!leader_) smem_.v_ring.arrive_full(slot);
    }
  }

 private:
  // The last rows of the tile belong to the next packed sequence, or are not used. Their probabilities are 0, but 0·inf
  // is NaN: clear them before anyone else sees the buffer.
  __device__ void load_cut(typename Traits::Element* buffer, const KeyBox& box, int rows) {
    if (leader_) smem_.tail.arrive_and_expect_tx(SmemV::kBytes);
    box.load<SmemV>(maps_.v, smem_.tail, buffer);
    smem_.tail.wait(tail_phase_);
    tail_phase_ ^= 1;
    constexpr int kVectorsPerRow = SmemV::kSlabBytes / SmemV::kRows / 16;
    for (int slab = 0; slab < SmemV::kSlabs; ++slab) {
      auto* vectors = reinterpret_cast<uint4*>(reinterpret_cast<char*>(buffer) + slab * SmemV::kSlabBytes);
#pragma unroll 1
      for (int i = rows * kVectorsPerRow + threadIdx.x % 32; i < SmemV::kRows * kVectorsPerRow; i += 32)
        vectors[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

  const ForwardParams& p_;
  const ForwardMaps& maps_;
  Smem& smem_;
  bool leader_;
  std::uint32_t tail_phase_ = 0;
};

}  // namespace flashsdk::sm90
