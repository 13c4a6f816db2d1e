// What the computing warpgroups of the SM90 backward do for head dimensions above 128.
//
// dK and dV of 64 keys fill the accumulators of one warpgroup each, so the work is divided by product and not by keys:
// the first computes Sᵀ, Pᵀ and dV += Pᵀ·dO, the second dPᵀ, dSᵀ = Pᵀ∘(dPᵀ − δ) and dK += dSᵀ·Q, both with register
// operands. P goes from the first to the second in the order of its registers, dS to both for their pieces of dQ, which
// go to device memory from registers. Each product that feeds dK, dV or dQ is issued one step late, under the
// element-wise work of the next.
#pragma once

#include "cuda/backward_passes.h"
#include "cuda/backward_scores.h"
#include "sm90/backward_fragments.h"
#include "sm90/backward_load.h"

namespace flashsdk::sm90 {

template <class Traits, class Policy, cuda::Features kFeatures>
class WideBackwardWarpgroup {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  using Scores = cuda::BackwardScores<Traits::kBlockM, Traits::kBlockN, Policy, kFeatures, true>;
  using MmaScores = typename Traits::MmaScores;
  using MmaDk = typename Traits::MmaDk;
  using MmaDv = typename Traits::MmaDv;
  using MmaDq = typename Traits::MmaDq;
  using SmemQ = typename Traits::SmemQ;
  using SmemDo = typename Traits::SmemDo;
  using SmemK = typename Traits::SmemK;
  using SmemV = typename Traits::SmemV;
  using SmemScores = typename Traits::SmemScores;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kStages = Traits::kStages;
  static constexpr int kPieces = Traits::kDqPieces / Traits::kWarpgroups;  // of dQ, for each warpgroup
  static constexpr bool kFeatured = cuda::has_dropout(kFeatures);

 public:
  __device__ WideBackwardWarpgroup(const BackwardParams& p, const cuda::BackwardWorkspace& ws, Smem& smem,
                                   int warpgroup)
      : p_(p), ws_(ws), smem_(smem), warpgroup_(warpgroup) {}

  __device__ void run() {
    for_each_work<Traits>(smem_, [&](const BackwardWork& work) {
      if (warpgroup_ == 0)
        compute_dv(work);
      else
        compute_dk(work);
    });
  }

 private:
  using Use = RingState<kStages>;

  __device__ void wait_keys(const BackwardWork& work, const SeqlenInfo& seq) {
    smem_.full_k.wait_full(nth_use<Traits::kKeyBuffers>(key_tiles_));
    smem_.full_v.wait_full(nth_use<Traits::kKeyBuffers>(key_tiles_));
    const int keys = seq.seqlen_k - work.tile.block * kBlockN;
    if (p_.cu_seqlens_k != nullptr && keys < kBlockN)
      clear_tails<Traits, SmemK, SmemV>(smem_.k, smem_.v, keys, warpgroup_);
  }
  __device__ void release_keys() {
    const auto use = nth_use<Traits::kKeyBuffers>(key_tiles_++);
    smem_.full_k.release(use);
    smem_.full_v.release(use);
  }
  __device__ BackwardStep wait_queries(const Use& use, const SeqlenInfo& seq) {
    smem_.full_q.wait_full(use);
    smem_.full_do.wait_full(use);
    const BackwardStep step = smem_.step[use.stage];
    if (step.cut)
      clear_tails<Traits, SmemQ, SmemDo>(smem_.q + use.stage * SmemQ::kElements,
                                         smem_.dout + use.stage * SmemDo::kElements,
                                         seq.seqlen_q - step.m_block * kBlockM, warpgroup_);
    return step;
  }

  // The first warpgroup: P and dV.
  __device__ void compute_dv(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch);
    auto acc_dv = accumulator<MmaDv, Traits::kHeadDimV>();
    cute::clear(acc_dv);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, work.tile);
      auto p_operand = cute::make_tensor<Element>(accumulator<MmaScores, kBlockM>().layout());
      BackwardStep last = step_dv<true>(scores, work, seq, {}, p_operand, acc_dv);
      while (!last.last) last = step_dv<false>(scores, work, seq, last, p_operand, acc_dv);
      start_dv(p_operand, acc_dv);
      cute::warpgroup_wait<0>();
      finished(acc_dv);
      finish_step();
      add_dq(work, seq, last);
      release_keys();
    }
    const float dv_scale = kFeatured ? p_.score.dropout.scale() : 1.f;
    store_gradient<Element>(acc_dv, dv_scale, p_.dv, seq, work.tile, work.tile.block * kBlockN, p_.head_dim_v);
  }

  // Scores and probabilities of this step, dV and dQ of the step before.
  template <bool kFirst, class Operand, class Accumulator>
  __device__ __forceinline__ BackwardStep step_dv(const Scores& scores, const BackwardWork& work, const SeqlenInfo& seq,
                                                  const BackwardStep& before, Operand& p_operand, Accumulator& acc_dv) {
    const Use use = nth_use<kStages>(steps_);
    const BackwardStep step = wait_queries(use, seq);
    auto acc_s = accumulator<MmaScores, kBlockM>();
    auto k = smem_tensor<typename SmemK::RowMajor>(smem_.k)(cute::_, cute::_, 0);
    auto q = smem_tensor<typename SmemQ::RowMajor>(smem_.q)(cute::_, cute::_, use.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(k), operand_b<MmaScores>(q), acc_s, false);
    if constexpr (!kFirst) start_dv(p_operand, acc_dv);
    cute::warpgroup_wait<kFirst ? 0 : 1>();
    finished(acc_s);
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    const TileRef tile{step.m_block, step.partial};
    const float* lse_log2 = smem_.lse_log2[use.stage];
    smem_.full_p.wait_empty(use);
    if constexpr (kFeatured) {
      auto factor = accumulator<MmaScores, kBlockM>();
      const auto kept =
          scores.featured_probabilities(as_matrix(acc_s), as_matrix(factor), at, step.head, tile, lse_log2);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(factor); ++i) factor(i) *= acc_s(i);
      auto weights = convert<Element>(factor);
      if constexpr (!kFirst) finish_dv(acc_dv);
      cute::copy(convert<Element>(acc_s), p_operand);
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
        auto all = as_atoms(weights), operand = as_atoms(p_operand);
        cuda::negate_dropped(all, kept);
        cuda::drop_pairs(operand, kept);
      });
      hand_over(weights, use);
    } else {
      scores.probabilities(as_matrix(acc_s), at, step.head, tile, lse_log2);
      if constexpr (!kFirst) finish_dv(acc_dv);
      cute::copy(convert<Element>(acc_s), p_operand);
      hand_over(p_operand, use);
    }
    if constexpr (!kFirst) add_dq(work, seq, before);
    ++steps_;
    return step;
  }
  template <class Accumulator>
  __device__ __forceinline__ void finish_dv(Accumulator& acc_dv) {
    cute::warpgroup_wait<0>();
    finished(acc_dv);
    finish_step();
  }
  template <class Fragment>
  __device__ __forceinline__ void hand_over(const Fragment& probabilities, const Use& use) {
    auto* target = reinterpret_cast<uint4*>(smem_.p[use.stage]) + threadIdx.x % kWarpgroup;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) target[i * kWarpgroup] = reinterpret_cast<const uint4*>(probabilities.data())[i];
    publish(smem_.full_p, use);
  }
  static constexpr int kVectors = kBlockM * kBlockN / kWarpgroup / 8;  // of 16 bytes, of P in one thread

  template <class Operand, class Accumulator>
  __device__ __forceinline__ void start_dv(Operand& p_operand, Accumulator& acc_dv) {
    auto dout = smem_tensor<typename SmemDo::Transposed>(smem_.dout)(cute::_, cute::_, (steps_ - 1) % kStages);
    start_gemm<MmaDv>(as_operand_a(p_operand), operand_b<MmaDv>(dout), acc_dv, true);
  }

  // The second warpgroup: dS and dK.
  __device__ void compute_dk(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch);
    auto acc_dk = accumulator<MmaDk, Traits::kHeadDim>();
    cute::clear(acc_dk);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, work.tile);
      auto ds_operand = cute::make_tensor<Element>(accumulator<MmaScores, kBlockM>().layout());
      BackwardStep last = step_dk<true>(scores, work, seq, {}, ds_operand, acc_dk);
      while (!last.last) last = step_dk<false>(scores, work, seq, last, ds_operand, acc_dk);
      start_dk(ds_operand, acc_dk);
      cute::warpgroup_wait<0>();
      finished(acc_dk);
      finish_step();
      add_dq(work, seq, last);
      release_keys();
    }
    store_gradient<Element>(acc_dk, p_.score.softmax_scale, p_.dk, seq, work.tile, work.tile.block * kBlockN,
                            p_.head_dim);
  }

  template <bool kFirst, class Operand, class Accumulator>
  __device__ __forceinline__ BackwardStep step_dk(const Scores& scores, const BackwardWork& work, const SeqlenInfo& seq,
                                                  const BackwardStep& before, Operand& ds_operand,
                                                  Accumulator& acc_dk) {
    const Use use = nth_use<kStages>(steps_);
    const BackwardStep step = wait_queries(use, seq);
    auto acc_dp = accumulator<MmaScores, kBlockM>();
    auto v = smem_tensor<typename SmemV::RowMajor>(smem_.v)(cute::_, cute::_, 0);
    auto dout = smem_tensor<typename SmemDo::RowMajor>(smem_.dout)(cute::_, cute::_, use.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(v), operand_b<MmaScores>(dout), acc_dp, false);
    if constexpr (!kFirst) start_dk(ds_operand, acc_dk);
    smem_.full_p.wait_full(use);
    auto p = cute::make_tensor<Element>(acc_dp.layout());
    const auto* source = reinterpret_cast<const uint4*>(smem_.p[use.stage]) + threadIdx.x % kWarpgroup;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(p.data())[i] = source[i * kWarpgroup];
    __syncwarp();
    smem_.full_p.release(use);
    cute::warpgroup_wait<kFirst ? 0 : 1>();
    finished(acc_dp);
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    if constexpr (kFeatured)
      scores.featured_gradients(as_matrix(p), as_matrix(acc_dp), at, smem_.delta[use.stage]);
    else
      scores.gradients(as_matrix(p), as_matrix(acc_dp), at, smem_.delta[use.stage]);
    if constexpr (!kFirst) {
      cute::warpgroup_wait<0>();
      finished(acc_dk);
      finish_step();
    }
    cute::copy(convert<Element>(acc_dp), ds_operand);
    smem_.full_ds.wait_empty(use);
    store_transposed(ds_operand, smem_.ds + use.stage * SmemScores::kElements);
    publish(smem_.full_ds, use);
    if constexpr (!kFirst) add_dq(work, seq, before);
    ++steps_;
    return step;
  }

  template <class Operand, class Accumulator>
  __device__ __forceinline__ void start_dk(Operand& ds_operand, Accumulator& acc_dk) {
    auto q = smem_tensor<typename SmemQ::Transposed>(smem_.q)(cute::_, cute::_, (steps_ - 1) % kStages);
    start_gemm<MmaDk>(as_operand_a(ds_operand), operand_b<MmaDk>(q), acc_dk, true);
  }

  // Q and dO of the step before are no longer read by this warpgroup.
  __device__ __forceinline__ void finish_step() {
    smem_.full_q.release(nth_use<kStages>(steps_ - 1));
    smem_.full_do.release(nth_use<kStages>(steps_ - 1));
  }

  // This warpgroup's pieces of dQᵀ = Kᵀ·dSᵀ of the step before.
  __device__ __forceinline__ void add_dq(const BackwardWork& work, const SeqlenInfo& seq, const BackwardStep& step) {
    const Use use = nth_use<kStages>(steps_ - 1);
    smem_.full_ds.wait_full(use);
    auto all_k = smem_tensor<typename SmemK::Transposed>(smem_.k)(cute::_, cute::_, 0);
    auto all_ds = smem_tensor<typename SmemScores::RowMajor>(smem_.ds)(cute::_, cute::_, use.stage);
    const std::int64_t first_piece =
        ws_.tile(p_, seq, work.tile.batch, step.head, step.m_block) * Traits::kDqPieces + warpgroup_ * kPieces;
    if (p_.deterministic) wait_turn(work, seq, step, first_piece);
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int piece = warpgroup_ * kPieces + i;
      auto k = cute::local_tile(all_k, Shape<Int<kWarpgroupRows>, Int<kBlockN>>{},
                                cute::make_coord(piece % Traits::kDqRowPieces, 0));
      auto ds = cute::local_tile(all_ds, Shape<Int<Traits::kDqColumns>, Int<kBlockN>>{},
                                 cute::make_coord(piece / Traits::kDqRowPieces, 0));
      auto acc_dq = accumulator<MmaDq, Traits::kDqColumns>();
      start_gemm<MmaDq>(operand_a<MmaDq>(k), operand_b<MmaDq>(ds), acc_dq, false);
      cute::warpgroup_wait<0>();
      finished(acc_dq);
      constexpr int kElements = decltype(cute::size(acc_dq))::value;
      cuda::add_to_dq_accum<kWarpgroup, kElements>(ws_.dq_accum + (first_piece + i) * Traits::kDqElements,
                                                   acc_dq.data(), threadIdx.x % kWarpgroup);
    }
    smem_.full_ds.release(use);
    if (p_.deterministic) pass_turn(first_piece);
  }

  // Deterministic: key tiles add to a tile of dq_accum in ascending order.
  __device__ void wait_turn(const BackwardWork& work, const SeqlenInfo& seq, const BackwardStep& step,
                            std::int64_t piece) {
    if (threadIdx.x % kWarpgroup == 0) {
      Policy policy(p_.mask, seq, work.tile.batch, step.head);
      const int rank = policy.row_walk(flashsdk::Tile{kBlockM, kBlockN}, step.m_block).rank_of(work.tile.block);
      volatile int* turn = ws_.turn + piece;
      while (*turn != rank) {
      }
      __threadfence();
    }
    barrier_sync(named_barrier::kBackwardTurn + warpgroup_, kWarpgroup);
  }
  __device__ void pass_turn(std::int64_t piece) {
    __threadfence();
    barrier_sync(named_barrier::kBackwardTurn + warpgroup_, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) *static_cast<volatile int*>(ws_.turn + piece) += 1;
  }

  const BackwardParams& p_;
  const cuda::BackwardWorkspace& ws_;
  Smem& smem_;
  int warpgroup_;
  unsigned steps_ = 0, key_tiles_ = 0;  // so far
};

}  // namespace flashsdk::sm90
