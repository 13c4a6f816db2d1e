// What a computing warpgroup of the SM90 backward does for head dimensions up to 128: it owns 64 keys.
//
// Of each tile of queries, with K and V of these keys (FlashAttention-2, algorithm 2, transposed):
//
//   Sᵀ = K·Qᵀ    Pᵀ = exp(scale·Sᵀ − lse)    dV += Pᵀ·dO
//   dPᵀ = V·dOᵀ  dSᵀ = Pᵀ∘(dPᵀ − delta)      dK += dSᵀ·Q    dQᵀ = Kᵀ·dSᵀ over the keys of all warpgroups
//
// dQ is computed one step late, so that warpgroups need not meet: while one does its exponentials, the tensor cores
// work for another.
#pragma once

#include "cuda/tile/backward_scores.h"
#include "sm90/backward/bias.h"
#include "sm90/backward/fragments.h"
#include "sm90/backward/load.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

// One computing warpgroup.
template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
class BackwardWarpgroup {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  using Scores = cuda::BackwardScores<Traits::kBlockM, Traits::kBlockN, Policy, kFeatures>;
  using MmaScores = typename Traits::MmaScores;
  using MmaDk = typename Traits::MmaDk;
  using MmaDv = typename Traits::MmaDv;
  using MmaDq = typename Traits::MmaDq;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kStagesDo = Traits::kStagesDo;
  using DsSlot = RingSlot<Traits::kStagesDs>;
  // Dropout is drawn under the products; beside softcap, where it is applied. A bias is added before dP.
  static constexpr bool kCaps = cuda::has_softcap(kFeatures), kBias = cuda::has_bias_alone(kFeatures);
  static constexpr bool kDraws = Traits::kDraws;
  static_assert(kDraws == (cuda::has_dropout(kFeatures) && !kCaps));
  // Where K comes ahead, V is what a key tile waits for: only before its first dP, and it is released after the last.
  // Ragged calls wait at once, as they clear its tail.
  static constexpr bool kLateV = Traits::kKeysAhead && !kRagged;
  // A load from shared memory takes some 140 cycles here, as the products keep it busy. So what a step needs is read
  // ahead, under products, and what waits for stores goes there too. Kernels with features have no registers for it.
  static constexpr bool kReadsAhead = kFeatures == cuda::Features::kNone;
  static constexpr int kHeldColumns = 16;  // queries of a thread whose lse and delta are then in registers
  template <class Layout>
  using RowMajor = typename Layout::RowMajor;

 public:
  __device__ BackwardWarpgroup(const BackwardParams& p, Smem& smem, int warpgroup)
      : p_(p), smem_(smem), warpgroup_(warpgroup), thread_(kept_thread()) {}

  __device__ void run() {
    for_each_work<Traits>(smem_, [&](const BackwardWork& work) { compute(work); });
  }

 private:
  __device__ void compute(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch);
    auto acc_dk = accumulator<MmaDk, Traits::kHeadDim>();
    auto acc_dv = accumulator<MmaDv, Traits::kHeadDimV>();
    auto acc_dq = accumulator<MmaDq, Traits::kDqColumns>();
    // The last dQ waits until the gradients are stored: by then the warp that adds has taken the one before from the
    // only buffer. Not in deterministic calls, where other thread blocks queue for this turn, nor where K has one
    // buffer, in kernels whose registers it would take.
    const bool dq_after_gradients = Traits::kKeysAhead && !p_.deterministic;
    if (work.visited) {
      smem_.k_ring.wait_full(RingSlot<Traits::kStagesK>::after(key_tiles_));
      if (!kLateV) wait_v();
      const int keys = seq.seqlen_k - work.tile.block * kBlockN;
      if (kRagged && keys < kBlockN) clear_key_tail<Traits>(smem_, key_buffer(), keys, warpgroup_);
      const Scores scores(p_, seq, work.tile);
      bool last = step<true>(scores, seq, acc_dk, acc_dv);
      while (!last) last = step<false>(scores, seq, acc_dk, acc_dv);
      publish_dq();
      if (!Traits::kKeysAhead) release_v();
      start_dq(acc_dq);
      cute::warpgroup_wait<0>();
      finished(acc_dq);
      smem_.k_ring.release(RingSlot<Traits::kStagesK>::after(key_tiles_++), thread_);
      if (!dq_after_gradients) hand_over_dq(acc_dq);
    } else {
      cute::clear(acc_dk);
      cute::clear(acc_dv);
    }
    const int first = work.tile.block * kBlockN + warpgroup_ * kWarpgroupRows;
    const float dv_scale = cuda::has_dropout(kFeatures) ? p_.score.dropout.scale() : 1.f;
    store_gradient<Element>(acc_dv, dv_scale, p_.dv, seq, work.tile, first, p_.head_dim_v);
    store_gradient<Element>(acc_dk, p_.score.softmax_scale, p_.dk, seq, work.tile, first, p_.head_dim);
    if (dq_after_gradients && work.visited) hand_over_dq(acc_dq);
  }

  // One tile of queries; dQ of the tile before. Returns whether it was the last. The three ways from S and dP to P and
  // dS: with dropout alone, with softcap (and what else is compiled in with it), and all others.
  template <bool kFirst, class AccDk, class AccDv>
  __device__ __forceinline__ bool step(const Scores& scores, const SeqlenInfo& seq, AccDk& acc_dk, AccDv& acc_dv) {
    const auto slot = RingSlot<kStagesDo>::after(steps_);
    const int stage = slot.stage;
    smem_.q_ring.wait_full(slot);
    const cuda::TopOfTile top(smem_.lse[stage].top);
    BackwardStep step;
    if constexpr (kReadsAhead) step = smem_.step[stage];
    // Ragged: before the scores, which then need not be lowered. Not so elsewhere, where the first product would wait
    // for what is read here, and rows behind the end are zeros anyway.
    if constexpr (kRagged) {
      if (has_blind_queries<kRagged, kBlockM>(smem_.lse[stage])) {
        smem_.dout_ring.wait_full(slot);
        clear_blind_queries<Traits, kRagged>(smem_, stage, stage, warpgroup_);
      }
    }

    // Anew each step: descriptors kept ahead of the loop are spilled, and loaded again by all warps.
    const int warpgroup = cuda::opaque(warpgroup_);
    auto k = cute::local_tile(smem_tensor<RowMajor<typename Traits::SmemK>>(smem_.k)(cute::_, cute::_, key_buffer()),
                              Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDimQ>>{}, cute::make_coord(warpgroup, 0));
    auto v = cute::local_tile(smem_tensor<RowMajor<typename Traits::SmemV>>(smem_.v)(cute::_, cute::_, 0),
                              Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDimV>>{}, cute::make_coord(warpgroup, 0));
    auto q = smem_tensor<RowMajor<typename Traits::SmemQ>>(smem_.q)(cute::_, cute::_, stage);
    auto dout = smem_tensor<RowMajor<typename Traits::SmemDo>>(smem_.dout)(cute::_, cute::_, stage);
    auto dout_t = smem_tensor<typename Traits::SmemDo::Transposed>(smem_.dout)(cute::_, cute::_, stage);
    auto q_t = smem_tensor<typename Traits::SmemQ::Transposed>(smem_.q)(cute::_, cute::_, stage);
    auto acc_s = accumulator<MmaScores, kBlockM>();
    auto acc_dp = accumulator<MmaScores, kBlockM>();
    start_gemm<MmaScores>(operand_a<MmaScores>(k), operand_b<MmaScores>(q), acc_s, false);  // Sᵀ = K·Qᵀ
    if constexpr (kReadsAhead && !kFirst) publish_dq();
    if constexpr (!kReadsAhead) step = smem_.step[stage];

    const DsSlot ds_slot = RingSlot<Traits::kStagesDs>::after(steps_);
    const auto bias = load_bias(scores, seq, step, ds_slot);
    const TileRef tile{step.m_block, step.partial};
    const auto at = coordinates();
    const auto lse_log2 = rows(smem_.lse[stage].lse_log2, at);
    smem_.dout_ring.wait_full(slot);
    // The scores of these rows, which are being computed, do not count.
    if (!kRagged && top.marked()) clear_blind_queries<Traits, kRagged>(smem_, stage, stage, warpgroup_);
    if constexpr (kFirst && kLateV) wait_v();
    start_gemm<MmaScores>(operand_a<MmaScores>(v), operand_b<MmaScores>(dout), acc_dp, false);  // dPᵀ = V·dOᵀ
    if constexpr (kDraws) draw(scores, step);
    const auto alibi = scores.alibi(step.head);

    if constexpr (kBias) {  // ahead of a wait for products: racecheck takes that for what brings lanes together
      cute::cp_async_wait<0>();
      __syncwarp();
    }
    // Pᵀ = exp(scale·Sᵀ − lse), under dPᵀ
    cute::warpgroup_wait<1>();
    finished(acc_s);
    if constexpr (kBias)
      scores.exponentials(as_matrix(acc_s), at, tile, lse_log2, top, bias);
    else if constexpr (!kCaps)
      scores.exponentials(as_matrix(acc_s), at, tile, lse_log2, top, alibi);
    const auto minus_delta = rows(smem_.minus_delta[stage], at);
    if constexpr (!kCaps) scores.hide(as_matrix(acc_s), at, step.head, tile);
    // dSᵀ = Pᵀ∘(dPᵀ − delta)
    cute::warpgroup_wait<0>();
    finished(acc_dp);
    if (Traits::kKeysAhead && step.last) release_v();
    if constexpr (kDraws)
      scores.gradients(as_matrix(acc_s), as_matrix(acc_dp), minus_delta, drawn());
    else if constexpr (!kCaps)
      scores.gradients(as_matrix(acc_s), as_matrix(acc_dp), minus_delta);
    const auto kept = [&] {
      if constexpr (kCaps)
        return scores.featured(as_matrix(acc_s), as_matrix(acc_dp), at, step.head, tile, lse_log2, minus_delta, top,
                               cuda::NoBiasTile());
      else
        return 0;
    }();
    auto probabilities = convert<Element>(acc_s);
    if constexpr (kCaps) {
      auto atoms = as_atoms(probabilities);
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] { cuda::drop_pairs(atoms, kept); });
    }
    auto ds = convert<Element>(acc_dp);

    store_ds(ds, ds_slot);
    start_gemm<MmaDv>(as_operand_a(probabilities), operand_b<MmaDv>(dout_t), acc_dv, !kFirst);  // dV += Pᵀ·dO
    publish(smem_.ds_ring, ds_slot, thread_);
    auto acc_dq = accumulator<MmaDq, Traits::kDqColumns>();
    if constexpr (!kFirst) start_dq(acc_dq);
    start_gemm<MmaDk>(as_operand_a(ds), operand_b<MmaDk>(q_t), acc_dk, !kFirst);  // dK += dSᵀ·Q
    cute::warpgroup_wait<1>();
    finished(acc_dv);
    smem_.dout_ring.release(slot, thread_);
    if constexpr (!kFirst) {
      finished(acc_dq);
      store_dq(acc_dq);
    }
    cute::warpgroup_wait<0>();
    finished(acc_dk);
    smem_.q_ring.release(slot, thread_);
    if constexpr (!kReadsAhead && !kFirst) publish_dq();
    ++steps_;
    return step.last;
  }

  // What dropout decides by, for the scores that are being computed: by all warps of the warpgroup, when all have read
  // what was drawn before, and to be read when all have drawn.
  __device__ __forceinline__ void draw(const Scores& scores, const BackwardStep& step) {
    cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
      barrier_sync(named_barrier::kBackwardDrawn + warpgroup_, kWarpgroup);
      Traits::Bytes::draw(smem_.drawn.of[warpgroup_], scores.rng(step.head), step.m_block * kBlockM,
                          scores.first_key() + warpgroup_ * kWarpgroupRows, thread_);
    });
  }
  // Where nothing is dropped nothing has been drawn: any byte is at least 0.
  __device__ __forceinline__ auto drawn() {
    barrier_sync(named_barrier::kBackwardDrawn + warpgroup_, kWarpgroup);
    return typename Traits::Bytes(smem_.drawn.of[warpgroup_], p_.score.dropout.threshold, thread_);
  }

  // The place of the dS of this warpgroup's keys.
  __device__ __forceinline__ Element* ds_slab(const DsSlot& slot) const {
    using Tile = typename Traits::SmemScores;
    static_assert(Tile::kSlabs == Traits::kWarpgroups);
    return smem_.ds + slot.stage * Tile::kElements + warpgroup_ * (Tile::kElements / Tile::kSlabs);
  }

  // Starts the copy of the bias to where dS will be, under the scores.
  __device__ __forceinline__ auto load_bias(const Scores& scores, const SeqlenInfo& seq, const BackwardStep& step,
                                            const DsSlot& slot) const {
    if constexpr (kBias) {
      const BackwardBias<Element, kBlockM> bias(p_.score, seq, scores.batch(), step.head,
                                                scores.first_key() + warpgroup_ * kWarpgroupRows, ds_slab(slot),
                                                thread_);
      smem_.ds_ring.wait_empty(slot);
      bias.load(step.m_block * kBlockM);
      cute::cp_async_fence();
      return bias;
    } else {
      return cuda::NoBiasTile();
    }
  }

  // dS of this warpgroup's keys, for all warpgroups.
  template <class Fragment>
  __device__ __forceinline__ void store_ds(const Fragment& ds, const DsSlot& slot) {
    smem_.ds_ring.wait_empty(slot);  // also where load_bias() has: without it ptxas orders the step to be 16 % slower
    store_transposed(ds, ds_slab(slot), thread_);
  }

  // dQᵀ = Kᵀ·dSᵀ of the step before.
  template <class Accumulator>
  __device__ __forceinline__ void start_dq(Accumulator& acc_dq) {
    const DsSlot slot = RingSlot<Traits::kStagesDs>::after(steps_ - 1);
    auto k_t =
        cute::local_tile(smem_tensor<typename Traits::SmemK::Transposed>(smem_.k)(cute::_, cute::_, key_buffer()),
                         Shape<Int<kWarpgroupRows>, Int<kBlockN>>{},
                         cute::make_coord(cuda::opaque(warpgroup_) % Traits::kDqRowPieces, 0));
    auto ds = cute::local_tile(
        smem_tensor<RowMajor<typename Traits::SmemScores>>(smem_.ds)(cute::_, cute::_, slot.stage),
        Shape<Int<Traits::kDqColumns>, Int<kBlockN>>{}, cute::make_coord(warpgroup_ / Traits::kDqRowPieces, 0));
    smem_.ds_ring.wait_full(slot);
    start_gemm<MmaDq>(operand_a<MmaDq>(k_t), operand_b<MmaDq>(ds), acc_dq, false);
  }

  // Once it is finished(): hands dQ, in the order of its registers, to the warp that adds it. The second half waits for
  // the stores of the first.
  template <class Accumulator>
  __device__ __forceinline__ void store_dq(Accumulator& acc_dq) {
    smem_.ds_ring.release(RingSlot<Traits::kStagesDs>::after(steps_ - 1), thread_);
    sm90::store_dq(smem_.dq[warpgroup_], smem_.dq_ring[warpgroup_], dq_tiles_, acc_dq, thread_);
    dq_is_stored_ = true;
  }
  __device__ __forceinline__ void publish_dq() {
    if (!dq_is_stored_) return;
    dq_is_stored_ = false;
    publish(smem_.dq_ring[warpgroup_], RingSlot<Traits::kDqPieces>::after(dq_tiles_++), thread_);
  }

  // store_dq() and publish_dq().
  template <class Accumulator>
  __device__ __forceinline__ void hand_over_dq(Accumulator& acc_dq) {
    store_dq(acc_dq);
    publish_dq();
  }

  __device__ __forceinline__ void wait_v() { smem_.v_ring.wait_full(RingSlot<1>::after(key_tiles_)); }
  __device__ __forceinline__ void release_v() { smem_.v_ring.release(RingSlot<1>::after(key_tiles_), thread_); }
  __device__ int key_buffer() const { return key_tiles_ % Traits::kStagesK; }

  template <class Coordinates>
  __device__ __forceinline__ static auto rows(const float* of_queries, const Coordinates& at) {
    if constexpr (kReadsAhead)
      return cuda::HeldRows<kHeldColumns, Coordinates>(of_queries, at);
    else
      return cuda::rows_of_queries(of_queries, at);
  }

  // Of the scores, (key, query) in the thread block's tile.
  __device__ auto coordinates() const {
    auto c = cute::make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{});
    auto own = cute::local_tile(c, Shape<Int<kWarpgroupRows>, Int<kBlockM>>{}, cute::make_coord(warpgroup_, 0));
    return as_matrix(MmaScores{}.get_thread_slice(thread_).partition_C(own));
  }

  const BackwardParams& p_;
  Smem& smem_;
  int warpgroup_, thread_;
  unsigned steps_ = 0, key_tiles_ = 0, dq_tiles_ = 0;  // so far
  bool dq_is_stored_ = false;                          // and not published
};

}  // namespace flashsdk::sm90
