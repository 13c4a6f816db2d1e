// What the computing warpgroups of the SM90 backward do for head dimensions above 128.
//
// dK and dV of 64 keys fill the accumulators of one warpgroup each, so the work is divided by product and not by keys:
// the first computes Sᵀ, Pᵀ and dV += Pᵀ·dO, the second dPᵀ, dSᵀ = Pᵀ∘(dPᵀ − δ) and dK += dSᵀ·Q, both with register
// operands. P goes from the first to the second in the order of its registers, dS to both for their pieces of dQ.
//
// In a cluster (PairBackwardTraits) dS goes to the warpgroups of both CTAs, each of which computes one piece of dQ a
// step late, so that no CTA waits for the other's exponentials.
#pragma once

#include "cuda/pass/backward_passes.h"
#include "cuda/tile/backward_scores.h"
#include "sm90/backward/fragments.h"
#include "sm90/backward/load.h"

namespace flashsdk::sm90 {

template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
class WideBackwardWarpgroup {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  using Scores = cuda::BackwardScores<Traits::kBlockM, Traits::kCtaKeys, Policy, kFeatures>;
  using MmaScores = typename Traits::MmaScores;
  using MmaDk = typename Traits::MmaDk;
  using MmaDv = typename Traits::MmaDv;
  using MmaDq = typename Traits::MmaDq;
  using SmemQ = typename Traits::SmemQ;
  using SmemDo = typename Traits::SmemDo;
  using SmemK = typename Traits::SmemK;
  using SmemV = typename Traits::SmemV;
  using SmemScores = typename Traits::SmemScores;
  static constexpr int kBlockM = Traits::kBlockM, kKeys = Traits::kCtaKeys, kStagesDo = Traits::kStagesDo;
  static constexpr bool kPair = Traits::kClusterSize > 1;
  static constexpr int kPieces = Traits::kDqPieces / Traits::kWarpgroups / Traits::kClusterSize;  // of a warpgroup's dQ
  static constexpr int kDqGroups = kPair ? 2 : kPieces;                                           // of products
  static constexpr bool kFeatured = cuda::has_dropout(kFeatures);

 public:
  __device__ WideBackwardWarpgroup(const BackwardParams& p, const cuda::BackwardWorkspace& ws, Smem& smem,
                                   int warpgroup)
      : p_(p), smem_(smem), warpgroup_(warpgroup), thread_(kept_thread()), dq_accum_(ws.dq_accum) {}

  __device__ void run() {
    for_each_work<Traits>(smem_, [&](const BackwardWork& work) {
      if (warpgroup_ == 0)
        compute_dv(work);
      else
        compute_dk(work);
    });
  }

 private:
  // Of a step: its Q, and its dO.
  struct QuerySlots {
    RingSlot<Traits::kStagesQ> q;
    RingSlot<kStagesDo> dout;
    static __device__ __forceinline__ QuerySlots after(unsigned steps) {
      return {RingSlot<Traits::kStagesQ>::after(steps), RingSlot<kStagesDo>::after(steps)};
    }
  };
  using DsSlot = RingSlot<Traits::kStagesDs>;

  // A buffer of Q, dO or dS: in a cluster both CTAs fill those of both.
  template <int kBuffers>
  __device__ __forceinline__ void release(const EmptyRing<kBuffers>& ring, const RingSlot<kBuffers>& slot) const {
    if constexpr (kPair)
      release_in_cluster(ring, slot, thread_);
    else
      ring.release(slot, thread_);
  }
  // The work of this CTA alone, as a tile of its keys.
  __device__ __forceinline__ cuda::TileWork own_work(const BackwardWork& work) const {
    return {first_key<Traits>(work.tile) / kKeys, work.tile.head, work.tile.batch};
  }

  __device__ void wait_keys(const BackwardWork& work, const SeqlenInfo& seq) {
    smem_.k_ring.wait_full(RingSlot<Traits::kStagesK>::after(key_tiles_));
    smem_.v_ring.wait_full(RingSlot<1>::after(key_tiles_));
    const int keys = seq.seqlen_k - work.tile.block * Traits::kBlockN;
    if (!kRagged || keys >= Traits::kBlockN) return;
    if constexpr (kPair) {
      const int peer_keys = keys - peer_rank() * kKeys;
      if (warpgroup_ == 0)
        clear_rows<typename Traits::SmemPeerK, true>(smem_.peer_k, [&](int row) { return row < peer_keys; });
    }
    clear_key_tail<Traits>(smem_, 0, seq.seqlen_k - first_key<Traits>(work.tile), warpgroup_);
  }
  __device__ void release_keys() {
    smem_.k_ring.release(RingSlot<Traits::kStagesK>::after(key_tiles_), thread_);
    smem_.v_ring.release(RingSlot<1>::after(key_tiles_++), thread_);
  }
  // Q of a step; blind queries are cleared by both warpgroups.
  __device__ __forceinline__ BackwardStep wait_queries(const QuerySlots& slots) {
    smem_.q_ring.wait_full(slots.q);
    const BackwardStep step = smem_.step[slots.q.stage];
    if (has_blind_queries<kRagged, kBlockM>(smem_.lse[slots.q.stage])) {
      smem_.dout_ring.wait_full(slots.dout);
      clear_blind_queries<Traits, kRagged>(smem_, slots.q.stage, slots.dout.stage, warpgroup_);
    }
    return step;
  }
  __device__ __forceinline__ int tile_of(const QuerySlots& slots) const {
    if constexpr (kPair)
      return smem_.tile[slots.q.stage];
    else
      return 0;  // known to the warps that add
  }
  __device__ __forceinline__ cuda::TopOfTile top_of(const QuerySlots& slots) {
    return cuda::TopOfTile(smem_.lse[slots.q.stage].top);
  }

  // The first warpgroup: P, dV, and its pieces of dQ of the step before, when the second has surely come to its dS.
  __device__ void compute_dv(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch, kRagged);
    auto acc_dv = accumulator<MmaDv, Traits::kHeadDimV>();
    cute::clear(acc_dv);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, own_work(work));
      bool last = step_dv<true>(scores, acc_dv);
      while (!last) last = step_dv<false>(scores, acc_dv);
      last_dq();
      release_keys();
    }
    const float dv_scale = kFeatured ? p_.score.dropout.scale() : 1.f;
    store_gradient<Element>(acc_dv, dv_scale, p_.dv, seq, work.tile, first_key<Traits>(work.tile), p_.head_dim_v);
  }

  template <bool kFirst, class Accumulator>
  __device__ __forceinline__ bool step_dv(const Scores& scores, Accumulator& acc_dv) {
    const QuerySlots slots = QuerySlots::after(steps_);
    const BackwardStep step = wait_queries(slots);
    const int tile = tile_of(slots);
    auto acc_s = accumulator<MmaScores, kBlockM>();
    auto k = smem_tensor<typename SmemK::RowMajor>(smem_.k)(cute::_, cute::_, 0);
    auto q = smem_tensor<typename SmemQ::RowMajor>(smem_.q)(cute::_, cute::_, slots.q.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(k), operand_b<MmaScores>(q), acc_s, false);
    const auto alibi = scores.alibi(step.head);
    cute::warpgroup_wait<0>();
    finished(acc_s);

    auto probabilities = compute_probabilities(scores, step, slots, acc_s, alibi);
    auto dout = smem_tensor<typename SmemDo::Transposed>(smem_.dout)(cute::_, cute::_, slots.dout.stage);
    smem_.dout_ring.wait_full(slots.dout);
    start_gemm<MmaDv>(as_operand_a(probabilities), operand_b<MmaDv>(dout), acc_dv, true);
    DqPieces acc_dq;
    if constexpr (!kFirst) start_dq(acc_dq, steps_ - 1);
    cute::warpgroup_wait<kFirst ? 0 : kDqGroups>();
    finished(acc_dv);
    cutlass::arch::fence_view_async_shared();
    release(smem_.q_ring, slots.q);  // and lse
    release(smem_.dout_ring, slots.dout);
    if constexpr (!kFirst) finish_dq(acc_dq, steps_ - 1);
    if constexpr (kPair) tile_ = tile;
    ++steps_;
    return step.last;
  }

  // P in 16 bits, also handed to the second warpgroup.
  template <class Accumulator>
  __device__ __forceinline__ auto compute_probabilities(const Scores& scores, const BackwardStep& step,
                                                        const QuerySlots& slots, Accumulator& acc_s,
                                                        const typename Scores::Alibi& alibi) {
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    const TileRef tile{step.m_block, step.partial};
    const auto lse_log2 = cuda::rows_of_queries(smem_.lse[slots.q.stage].lse_log2, at);
    const DsSlot buffer = RingSlot<Traits::kStagesDs>::after(steps_);
    smem_.p_ring.wait_empty(buffer);
    if constexpr (kFeatured) {
      auto factor = accumulator<MmaScores, kBlockM>();
      const auto kept = scores.featured_probabilities(as_matrix(acc_s), as_matrix(factor), at, step.head, tile,
                                                      lse_log2, top_of(slots));
      CUTE_UNROLL
      for (int i = 0; i < cute::size(factor); ++i) factor(i) *= acc_s(i);
      auto weights = convert<Element>(factor), probabilities = convert<Element>(acc_s);
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
        auto all = as_atoms(weights), own = as_atoms(probabilities);
        cuda::negate_dropped(all, kept);
        cuda::drop_pairs(own, kept);
      });
      hand_over(weights, buffer);
      return probabilities;
    } else {
      scores.probabilities(as_matrix(acc_s), at, step.head, tile, lse_log2, top_of(slots), alibi);
      auto probabilities = convert<Element>(acc_s);
      hand_over(probabilities, buffer);
      return probabilities;
    }
  }
  template <class Fragment>
  __device__ __forceinline__ void hand_over(const Fragment& probabilities, const DsSlot& slot) {
    auto* target = reinterpret_cast<uint4*>(smem_.p[slot.stage]) + thread_;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) target[i * kWarpgroup] = reinterpret_cast<const uint4*>(probabilities.data())[i];
    barrier_arrive(named_barrier::kBackwardScores + slot.stage, 2 * kWarpgroup);
  }
  static constexpr int kVectors = kBlockM * kKeys / kWarpgroup / 8;  // of 16 bytes, of P in one thread

  // The second warpgroup: dS, dK and its pieces of dQ.
  __device__ void compute_dk(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch, kRagged);
    auto acc_dk = accumulator<MmaDk, Traits::kHeadDim>();
    cute::clear(acc_dk);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, own_work(work));
      bool last = false;
      if constexpr (kPair) last = step_dk<false>(scores, acc_dk);
      while (!last) last = step_dk<true>(scores, acc_dk);
      if constexpr (kPair) last_dq();
      release_keys();
    }
    store_gradient<Element>(acc_dk, p_.score.softmax_scale, p_.dk, seq, work.tile, first_key<Traits>(work.tile),
                            p_.head_dim);
  }

  template <bool kHasDq, class Accumulator>  // of this step, or in a cluster of the one before
  __device__ __forceinline__ bool step_dk(const Scores& scores, Accumulator& acc_dk) {
    const QuerySlots slots = QuerySlots::after(steps_);
    const DsSlot buffer = RingSlot<Traits::kStagesDs>::after(steps_);
    const BackwardStep step = wait_queries(slots);
    const int tile = tile_of(slots);
    smem_.dout_ring.wait_full(slots.dout);
    auto acc_dp = accumulator<MmaScores, kBlockM>();
    auto v = smem_tensor<typename SmemV::RowMajor>(smem_.v)(cute::_, cute::_, 0);
    auto dout = smem_tensor<typename SmemDo::RowMajor>(smem_.dout)(cute::_, cute::_, slots.dout.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(v), operand_b<MmaScores>(dout), acc_dp, false);
    barrier_sync(named_barrier::kBackwardScores + buffer.stage, 2 * kWarpgroup);
    auto p = cute::make_tensor<Element>(acc_dp.layout());
    const auto* source = reinterpret_cast<const uint4*>(smem_.p[buffer.stage]) + thread_;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(p.data())[i] = source[i * kWarpgroup];
    cute::warpgroup_wait<0>();
    finished(acc_dp);
    smem_.p_ring.release(buffer, thread_);
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    const auto minus_delta = cuda::rows_of_queries(smem_.minus_delta[slots.dout.stage], at);
    if constexpr (kFeatured)
      scores.featured_gradients(as_matrix(p), as_matrix(acc_dp), minus_delta);
    else
      scores.gradients(as_matrix(p), as_matrix(acc_dp), minus_delta);
    auto ds = convert<Element>(acc_dp);
    smem_.ds_ring.wait_empty(buffer);
    store_transposed(ds, smem_.ds + buffer.stage * SmemScores::kElements, thread_);
    if constexpr (kPair)
      publish(smem_.own_ds_ring, buffer, thread_);
    else
      publish(smem_.ds_ring, buffer, thread_);

    auto q = smem_tensor<typename SmemQ::Transposed>(smem_.q)(cute::_, cute::_, slots.q.stage);
    start_gemm<MmaDk>(as_operand_a(ds), operand_b<MmaDk>(q), acc_dk, true);
    release(smem_.dout_ring, slots.dout);  // and delta
    const unsigned dq_step = kPair ? steps_ - 1 : steps_;
    DqPieces acc_dq;
    if constexpr (kHasDq) start_dq(acc_dq, dq_step);
    cute::warpgroup_wait<kHasDq ? kDqGroups : 0>();
    finished(acc_dk);
    release(smem_.q_ring, slots.q);
    if constexpr (kHasDq) finish_dq(acc_dq, dq_step);
    if constexpr (kPair) tile_ = tile;
    ++steps_;
    return step.last;
  }

  // This warpgroup's pieces of dQᵀ = Kᵀ·dSᵀ of one step, a product each.
  struct DqPieces {
    decltype(accumulator<MmaDq, Traits::kDqColumns>()) acc[kPieces];
  };
  __device__ __forceinline__ void start_dq(DqPieces& pieces, unsigned step) {
    const DsSlot slot = DsSlot::after(step);
    smem_.ds_ring.wait_full(slot);
    auto all_k = smem_tensor<typename SmemK::Transposed>(smem_.k)(cute::_, cute::_, 0);
    auto all_ds = smem_tensor<typename SmemScores::RowMajor>(smem_.ds)(cute::_, cute::_, slot.stage);
    if constexpr (kPair) {
      auto peer_k = smem_tensor<typename Traits::SmemPeerK::Transposed>(smem_.peer_k)(cute::_, cute::_, 0);
      start_product(pieces.acc[0], all_k, cluster_rank() * Traits::kWarpgroups + warpgroup_, all_ds, 0, false);
      start_product(pieces.acc[0], peer_k, warpgroup_, all_ds, 1, true);
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        const int piece = warpgroup_ * kPieces + i;
        auto ds = cute::local_tile(all_ds, Shape<Int<Traits::kDqColumns>, Int<kKeys>>{},
                                   cute::make_coord(piece / Traits::kDqRowPieces, 0));
        start_product(pieces.acc[i], all_k, piece % Traits::kDqRowPieces, ds, 0, false);
      }
    }
  }
  // A product: piece `row_piece`, of 64 rows, of Kᵀ times slab `slab` of dS.
  template <class Accumulator, class TransposedK, class Ds>
  __device__ __forceinline__ void start_product(Accumulator& acc, const TransposedK& all_k, int row_piece,
                                                const Ds& all_ds, int slab, bool accumulate) {
    auto k = cute::local_tile(all_k, Shape<Int<kWarpgroupRows>, Int<kKeys>>{}, cute::make_coord(row_piece, 0));
    auto ds = cute::local_tile(all_ds, Shape<Int<Traits::kDqColumns>, Int<kKeys>>{}, cute::make_coord(0, slab));
    start_gemm<MmaDq>(operand_a<MmaDq>(k), operand_b<MmaDq>(ds), acc, accumulate);
  }
  // Hands each to the warp that adds it, while the next ones are computed; in a cluster adds it from registers.
  template <int kPiece = 0>
  __device__ __forceinline__ void finish_dq(DqPieces& pieces, unsigned step) {
    auto& acc = pieces.acc[kPiece];
    cute::warpgroup_wait<kPieces - 1 - kPiece>();
    finished(acc);
    if constexpr (kPiece + 1 == kPieces) release(smem_.ds_ring, DsSlot::after(step));
    if constexpr (kPair) {
      const int piece = tile_ * Traits::kDqPieces + cluster_rank() * Traits::kWarpgroups + warpgroup_;
      cuda::add_to_dq_accum<kWarpgroup, cute::size(decltype(pieces.acc[0].layout()){})>(
          dq_accum_ + std::int64_t{piece} * Traits::kDqElements, acc.data(), thread_);
    } else {
      store_dq(smem_.dq[warpgroup_], smem_.dq_ring[warpgroup_], dq_pieces_, acc, thread_);
      publish(smem_.dq_ring[warpgroup_], RingSlot<Traits::kDqPieces>::after(dq_pieces_++), thread_);
    }
    if constexpr (kPiece + 1 < kPieces) finish_dq<kPiece + 1>(pieces, step);
  }
  // Of the last step, where it is late.
  __device__ __forceinline__ void last_dq() {
    DqPieces acc_dq;
    start_dq(acc_dq, steps_ - 1);
    finish_dq(acc_dq, steps_ - 1);
  }

  const BackwardParams& p_;
  Smem& smem_;
  int warpgroup_, thread_;
  unsigned steps_ = 0, key_tiles_ = 0, dq_pieces_ = 0;  // so far
  float* dq_accum_;
  int tile_ = 0;  // of queries, of the step before
};

}  // namespace flashsdk::sm90
