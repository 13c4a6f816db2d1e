// What the computing warpgroups of the SM90 backward do for head dimensions above 128.
//
// dK and dV of 64 keys fill the accumulators of one warpgroup each, so the work is divided by product and not by keys:
// the first computes Sᵀ, Pᵀ and dV += Pᵀ·dO, the second dPᵀ, dSᵀ = Pᵀ∘(dPᵀ − δ) and dK += dSᵀ·Q, both with register
// operands. P goes from the first to the second in the order of its registers, dS to both for their pieces of dQ.
#pragma once

#include "cuda/backward_scores.h"
#include "sm90/backward_fragments.h"
#include "sm90/backward_load.h"

namespace flashsdk::sm90 {

template <class Traits, class Policy, cuda::Features kFeatures, bool kPacked>
class WideBackwardWarpgroup {
  using Element = typename Traits::Element;
  using Smem = typename Traits::Smem;
  using Scores = cuda::BackwardScores<Traits::kBlockM, Traits::kBlockN, Policy, kFeatures>;
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
  __device__ WideBackwardWarpgroup(const BackwardParams& p, Smem& smem, int warpgroup)
      : p_(p), smem_(smem), warpgroup_(warpgroup), thread_(kept_thread()) {}

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
  struct Use {
    RingState<Traits::kQueryStages> q;
    RingState<kStages> dout;
    static __device__ __forceinline__ Use after(unsigned steps) {
      return {RingState<Traits::kQueryStages>::after(steps), RingState<kStages>::after(steps)};
    }
  };
  using ScoreUse = RingState<Traits::kScoreBuffers>;

  __device__ void wait_keys(const BackwardWork& work, const SeqlenInfo& seq) {
    smem_.full_k.wait_full(RingState<Traits::kKeyBuffers>::after(key_tiles_));
    smem_.full_v.wait_full(RingState<1>::after(key_tiles_));
    const int keys = seq.seqlen_k - work.tile.block * kBlockN;
    if (kPacked && keys < kBlockN) clear_key_tail<Traits>(smem_, 0, keys, warpgroup_);
  }
  __device__ void release_keys() {
    smem_.full_k.release(RingState<Traits::kKeyBuffers>::after(key_tiles_), thread_);
    smem_.full_v.release(RingState<1>::after(key_tiles_++), thread_);
  }
  // Q of a step; blind queries are cleared by both warpgroups.
  __device__ __forceinline__ BackwardStep wait_queries(const Use& use) {
    smem_.full_q.wait_full(use.q);
    const BackwardStep step = smem_.step[use.q.stage];
    if (has_blind_queries<kPacked, kBlockM>(smem_.lse_log2[use.q.stage])) {
      smem_.full_do.wait_full(use.dout);
      clear_blind_queries<Traits, kPacked>(smem_, use.q.stage, use.dout.stage, warpgroup_);
    }
    return step;
  }
  __device__ __forceinline__ const float* const& top_of(const Use& use) {
    return cuda::mark_of(smem_.lse_log2[use.q.stage], kBlockM);
  }

  // The first warpgroup: P, dV, and its pieces of dQ of the step before, when the second has surely come to its dS.
  __device__ void compute_dv(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch);
    auto acc_dv = accumulator<MmaDv, Traits::kHeadDimV>();
    cute::clear(acc_dv);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, work.tile);
      bool last = step_dv<true>(scores, acc_dv);
      while (!last) last = step_dv<false>(scores, acc_dv);
      DqPieces acc_dq;
      start_dq(acc_dq, steps_ - 1);
      finish_dq(acc_dq, steps_ - 1);
      release_keys();
    }
    const float dv_scale = kFeatured ? p_.score.dropout.scale() : 1.f;
    store_gradient<Element>(acc_dv, dv_scale, p_.dv, seq, work.tile, work.tile.block * kBlockN, p_.head_dim_v);
  }

  template <bool kFirst, class Accumulator>
  __device__ __forceinline__ bool step_dv(const Scores& scores, Accumulator& acc_dv) {
    const Use use = Use::after(steps_);
    const BackwardStep step = wait_queries(use);
    auto acc_s = accumulator<MmaScores, kBlockM>();
    auto k = smem_tensor<typename SmemK::RowMajor>(smem_.k)(cute::_, cute::_, 0);
    auto q = smem_tensor<typename SmemQ::RowMajor>(smem_.q)(cute::_, cute::_, use.q.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(k), operand_b<MmaScores>(q), acc_s, false);
    const auto alibi = scores.alibi(step.head);
    cute::warpgroup_wait<0>();
    finished(acc_s);

    auto probabilities = compute_probabilities(scores, step, use, acc_s, alibi);
    auto dout = smem_tensor<typename SmemDo::Transposed>(smem_.dout)(cute::_, cute::_, use.dout.stage);
    smem_.full_do.wait_full(use.dout);
    start_gemm<MmaDv>(as_operand_a(probabilities), operand_b<MmaDv>(dout), acc_dv, true);
    DqPieces acc_dq;
    if constexpr (!kFirst) start_dq(acc_dq, steps_ - 1);
    cute::warpgroup_wait<kFirst ? 0 : kPieces>();
    finished(acc_dv);
    smem_.full_q.release_after_reading(use.q, thread_);  // and lse
    smem_.full_do.release(use.dout, thread_);
    if constexpr (!kFirst) finish_dq(acc_dq, steps_ - 1);
    ++steps_;
    return step.last;
  }

  // P in 16 bits, also handed to the second warpgroup.
  template <class Accumulator>
  __device__ __forceinline__ auto compute_probabilities(const Scores& scores, const BackwardStep& step, const Use& use,
                                                        Accumulator& acc_s, const typename Scores::Alibi& alibi) {
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    const TileRef tile{step.m_block, step.partial};
    const auto lse_log2 = cuda::rows_of_queries(smem_.lse_log2[use.q.stage], at);
    const ScoreUse buffer = RingState<Traits::kScoreBuffers>::after(steps_);
    smem_.empty_p.wait_empty(buffer);
    if constexpr (kFeatured) {
      auto factor = accumulator<MmaScores, kBlockM>();
      const auto kept = scores.featured_probabilities(as_matrix(acc_s), as_matrix(factor), at, step.head, tile,
                                                      lse_log2, top_of(use));
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
      scores.probabilities(as_matrix(acc_s), at, step.head, tile, lse_log2, top_of(use), alibi);
      auto probabilities = convert<Element>(acc_s);
      hand_over(probabilities, buffer);
      return probabilities;
    }
  }
  template <class Fragment>
  __device__ __forceinline__ void hand_over(const Fragment& probabilities, const ScoreUse& use) {
    auto* target = reinterpret_cast<uint4*>(smem_.p[use.stage]) + thread_;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) target[i * kWarpgroup] = reinterpret_cast<const uint4*>(probabilities.data())[i];
    barrier_arrive(named_barrier::kBackwardScores + use.stage, 2 * kWarpgroup);
  }
  static constexpr int kVectors = kBlockM * kBlockN / kWarpgroup / 8;  // of 16 bytes, of P in one thread

  // The second warpgroup: dS, dK and its pieces of dQ.
  __device__ void compute_dk(const BackwardWork& work) {
    const SeqlenInfo seq(p_, work.tile.batch);
    auto acc_dk = accumulator<MmaDk, Traits::kHeadDim>();
    cute::clear(acc_dk);
    if (work.visited) {
      wait_keys(work, seq);
      const Scores scores(p_, seq, work.tile);
      while (!step_dk(scores, acc_dk)) {
      }
      release_keys();
    }
    store_gradient<Element>(acc_dk, p_.score.softmax_scale, p_.dk, seq, work.tile, work.tile.block * kBlockN,
                            p_.head_dim);
  }

  template <class Accumulator>
  __device__ __forceinline__ bool step_dk(const Scores& scores, Accumulator& acc_dk) {
    const Use use = Use::after(steps_);
    const ScoreUse buffer = RingState<Traits::kScoreBuffers>::after(steps_);
    const BackwardStep step = wait_queries(use);
    smem_.full_do.wait_full(use.dout);
    auto acc_dp = accumulator<MmaScores, kBlockM>();
    auto v = smem_tensor<typename SmemV::RowMajor>(smem_.v)(cute::_, cute::_, 0);
    auto dout = smem_tensor<typename SmemDo::RowMajor>(smem_.dout)(cute::_, cute::_, use.dout.stage);
    start_gemm<MmaScores>(operand_a<MmaScores>(v), operand_b<MmaScores>(dout), acc_dp, false);
    barrier_sync(named_barrier::kBackwardScores + buffer.stage, 2 * kWarpgroup);
    auto p = cute::make_tensor<Element>(acc_dp.layout());
    const auto* source = reinterpret_cast<const uint4*>(smem_.p[buffer.stage]) + thread_;
    CUTE_UNROLL
    for (int i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(p.data())[i] = source[i * kWarpgroup];
    cute::warpgroup_wait<0>();
    finished(acc_dp);
    smem_.empty_p.release(buffer, thread_);
    const auto at = matrix_coordinates<MmaScores, kBlockM>();
    const auto minus_delta = cuda::rows_of_queries(smem_.minus_delta[use.dout.stage], at);
    if constexpr (kFeatured)
      scores.featured_gradients(as_matrix(p), as_matrix(acc_dp), minus_delta);
    else
      scores.gradients(as_matrix(p), as_matrix(acc_dp), minus_delta);
    auto ds = convert<Element>(acc_dp);
    smem_.full_ds.wait_empty(buffer);
    store_transposed(ds, smem_.ds + buffer.stage * SmemScores::kElements, thread_);
    publish(smem_.full_ds, buffer, thread_);

    auto q = smem_tensor<typename SmemQ::Transposed>(smem_.q)(cute::_, cute::_, use.q.stage);
    start_gemm<MmaDk>(as_operand_a(ds), operand_b<MmaDk>(q), acc_dk, true);
    smem_.full_do.release(use.dout, thread_);  // and delta
    DqPieces acc_dq;
    start_dq(acc_dq, steps_);
    cute::warpgroup_wait<kPieces>();
    finished(acc_dk);
    smem_.full_q.release(use.q, thread_);
    finish_dq(acc_dq, steps_);
    ++steps_;
    return step.last;
  }

  // This warpgroup's pieces of dQᵀ = Kᵀ·dSᵀ of one step, a product each.
  struct DqPieces {
    decltype(accumulator<MmaDq, Traits::kDqColumns>()) acc[kPieces];
  };
  __device__ __forceinline__ void start_dq(DqPieces& pieces, unsigned step) {
    const ScoreUse use = ScoreUse::after(step);
    smem_.full_ds.wait_full(use);
    auto all_k = smem_tensor<typename SmemK::Transposed>(smem_.k)(cute::_, cute::_, 0);
    auto all_ds = smem_tensor<typename SmemScores::RowMajor>(smem_.ds)(cute::_, cute::_, use.stage);
    CUTE_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const int piece = warpgroup_ * kPieces + i;
      auto k = cute::local_tile(all_k, Shape<Int<kWarpgroupRows>, Int<kBlockN>>{},
                                cute::make_coord(piece % Traits::kDqRowPieces, 0));
      auto ds = cute::local_tile(all_ds, Shape<Int<Traits::kDqColumns>, Int<kBlockN>>{},
                                 cute::make_coord(piece / Traits::kDqRowPieces, 0));
      start_gemm<MmaDq>(operand_a<MmaDq>(k), operand_b<MmaDq>(ds), pieces.acc[i], false);
    }
  }
  // Hands each to the warp that adds it, while the next ones are computed.
  template <int kPiece = 0>
  __device__ __forceinline__ void finish_dq(DqPieces& pieces, unsigned step) {
    auto& acc = pieces.acc[kPiece];
    cute::warpgroup_wait<kPieces - 1 - kPiece>();
    finished(acc);
    if constexpr (kPiece + 1 == kPieces) smem_.full_ds.release(ScoreUse::after(step), thread_);
    store_dq(smem_.dq[warpgroup_], smem_.full_dq[warpgroup_], dq_pieces_, acc, thread_);
    publish(smem_.full_dq[warpgroup_], RingState<Traits::kDqPieces>::after(dq_pieces_++), thread_);
    if constexpr (kPiece + 1 < kPieces) finish_dq<kPiece + 1>(pieces, step);
  }

  const BackwardParams& p_;
  Smem& smem_;
  int warpgroup_, thread_;
  unsigned steps_ = 0, key_tiles_ = 0, dq_pieces_ = 0;  // so far
};

}  // namespace flashsdk::sm90
