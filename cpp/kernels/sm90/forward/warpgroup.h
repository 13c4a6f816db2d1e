// What a computing warpgroup of the SM90 forward does: it owns 64 queries of the tile (forward.h says how it works).
//
// Nearly all tiles take the common step, a loop without a branch. Those that a mask cuts, that are the first of their
// queries, or that cannot be tried take the other one, made from the same source. Those that a step leaves without
// scores, and the very first, are computed by code outside both; those of which nothing is seen are passed over.
//
// The compiler knows that a warp's branches are the same for all its lanes: messages and votes come through
// warp_uniform() and __all_sync(). Without that, every branch is a place where lanes are waited for, and each lane
// keeps descriptors of operands for itself (docs/dev/log-sm90-forward.md, version 7).
#pragma once

#include "sm90/forward/scores.h"
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
    if (warpgroup_ == 0) wait();  // as many waits as passes; a block without work leaves one pass, which harms nobody
  }

 private:
  static constexpr bool kNeeded = kTurns && kWarpgroups > 1;
  int warpgroup_;
};

// What the loading warps hand over, by the numbers of tiles of keys and of queries.
template <class Traits>
class ForwardInput {
 public:
  using Keys = RingSlot<Traits::kStagesK>;
  using Values = RingSlot<Traits::kStagesV>;
  using Queries = RingSlot<Traits::kStagesQ>;

  __device__ explicit ForwardInput(typename Traits::Smem& smem) : smem_(smem) {}

  __device__ ForwardStep read_step(unsigned index) const {
    if constexpr (Traits::kReadsAhead) {
      smem_.step_ring.wait_full(RingSlot<Traits::kSlots>::after(index));
    } else {
      smem_.k_ring.wait_full(Keys::after(index));
    }
    ForwardStep tile = smem_.step.of(index);
    tile.flags = cuda::warp_uniform(tile.flags);
    return tile;
  }
  __device__ void wait_for_keys(unsigned index) const {
    if constexpr (Traits::kReadsAhead) smem_.k_ring.wait_full(Keys::after(index));
  }
  __device__ void wait_for_queries(unsigned work) const { smem_.q_ring.wait_full(Queries::after(work)); }
  __device__ void release_keys(const ForwardStep& tile, unsigned index, unsigned work) const {
    smem_.k_ring.release(Keys::after(index));
    if (tile.has(ForwardStep::kLast)) smem_.q_ring.release(Queries::after(work));
  }
  __device__ const ForwardWork& queries_of(unsigned work) const { return smem_.work.of(work); }

 private:
  typename Traits::Smem& smem_;
};

template <class Traits, class Policy, cuda::Features kFeatures>
class ForwardWarpgroup {
  using MmaScores = typename Traits::MmaScores;
  using MmaOut = typename Traits::MmaOut;
  using Input = ForwardInput<Traits>;
  using Scores = ForwardScores<Traits, Policy, kFeatures>;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  __device__ ForwardWarpgroup(const ForwardParams& p, ForwardSmem<Traits, kFeatures>& smem, int warpgroup)
      : smem_(smem),
        warpgroup_(warpgroup),
        uncommon_(ForwardStep::uncommon(warpgroup)),
        input_(smem),
        turn_(warpgroup),
        scores_(p, smem.bias_of(warpgroup), warpgroup) {}

  __device__ void run() {
    next_ = input_.read_step(0);
    if (next_.has(ForwardStep::kEnd)) return;
    scores_.load_bias(next_, of(0));
    auto acc_out = accumulator<MmaOut, Traits::kHeadDimV>();
    auto probabilities = cute::make_tensor_like<typename Traits::Element>(accumulator<MmaScores, kBlockN>());
    const auto operands = make_operands();
    for (bool has_scores = false;;) {  // the very first tile's are computed like those that a try has lost
      while (has_scores && is_common()) has_scores = step<true>(operands, acc_out, probabilities);
      if (has_scores) {
        if (next_.has(ForwardStep::kEnd)) break;
        if (Traits::kSkips && next_.has(ForwardStep::kHidden, warpgroup_)) {
          pass_over(operands, acc_out, probabilities);
          continue;
        }
        has_scores = step<false>(operands, acc_out, probabilities);
      }
      if (!has_scores) {
        redo(operands, acc_out, probabilities);
        has_scores = true;
      }
    }
    turn_.end();
    start_out(operands, acc_out, probabilities, index_);
    scores_.close();
    finish_out(acc_out, index_);
    write_output(acc_out);
  }

 private:
  __device__ __forceinline__ bool is_common() const {
    return (next_.flags & uncommon_) == 0 && (!Traits::kTries || scores_.can_try());
  }

  // A step computes the next tile's scores and, under their softmax, P·V of this one, and makes the next one this.
  // False where a try has failed or could not be made: the turn is over and P·V runs, but the next tile is still next,
  // without scores and with its K and Q held, and redo() follows. kCommon: the next tile is neither masked nor the
  // first of its queries, and may be tried.
  template <bool kCommon, class Operands, class Out, class Probabilities>
  __device__ __forceinline__ bool step(const Operands& operands, Out& acc_out, Probabilities& probabilities) {
    const unsigned index = index_;
    const bool first = !kCommon && next_.has(ForwardStep::kFirst);
    const unsigned work = work_ + first;
    input_.wait_for_keys(index + 1);
    if (first) input_.wait_for_queries(work);
    turn_.wait();
    auto acc = accumulator<MmaScores, kBlockN>();
    start_scores(operands, acc, index + 1, work);
    start_out(operands, acc_out, probabilities, index);
    turn_.pass();
    ForwardStep after;
    if constexpr (Traits::kReadsAhead) after = input_.read_step(index + 2);
    const auto visible = kCommon ? typename Scores::Visible{} : scores_.visible(next_, of(work));
    const auto alibi = scores_.alibi(of(work));
    scores_.wait_for_bias();
    cute::warpgroup_wait<1>();
    finished(acc);
    typename Scores::Factors factors;
    if constexpr (Traits::kTries) {
      if (!scores_.template try_apply<kCommon>(acc, next_, of(work), visible, alibi)) return false;
    } else {
      scores_.template apply<kCommon>(acc, factors, next_, of(work), visible, alibi);
    }
    input_.release_keys(next_, index + 1, work);
    finish_out(acc_out, index);
    scores_.keep(acc, probabilities, next_, of(work));
    cuda::branch_if(first, [&] { write_output(acc_out); });
    if constexpr (!Traits::kTries) {
      if (!first) scores_.rescale(acc_out, factors);
    }
    if constexpr (!Traits::kReadsAhead) after = input_.read_step(index + 2);
    advance(index + 1, work, after);
    return true;
  }

  // The same where step() has left the next tile without scores, or, for the very first, where there was no step.
  template <class Operands, class Out, class Probabilities>
  __device__ __forceinline__ void redo(const Operands& operands, Out& acc_out, Probabilities& probabilities) {
    const bool first = next_.has(ForwardStep::kFirst);
    const unsigned index = index_ + 1, work = work_ + first;
    if (index != 0) {
      finish_out(acc_out, index_);
      if (first) write_output(acc_out);
    }
    input_.wait_for_keys(index);
    input_.wait_for_queries(work);
    auto acc = accumulator<MmaScores, kBlockN>();
    start_scores(operands, acc, index, work);
    const auto alibi = scores_.alibi(of(work));
    scores_.wait_for_bias();
    cute::warpgroup_wait<0>();
    finished(acc);
    typename Scores::Factors factors;
    scores_.template apply<false>(acc, factors, next_, of(work), scores_.visible(next_, of(work)), alibi);
    input_.release_keys(next_, index, work);
    scores_.keep(acc, probabilities, next_, of(work));
    if (!first) scores_.rescale(acc_out, factors);
    advance(index, work, input_.read_step(index + 1));
  }

  // The same where this warpgroup sees nothing of the next tile: its probabilities are 0.
  template <class Operands, class Out, class Probabilities>
  __device__ __forceinline__ void pass_over(const Operands& operands, Out& acc_out, Probabilities& probabilities) {
    const unsigned index = index_;
    input_.wait_for_keys(index + 1);
    turn_.wait();
    start_out(operands, acc_out, probabilities, index);
    turn_.pass();
    input_.release_keys(next_, index + 1, work_);
    scores_.wait_for_bias();
    finish_out(acc_out, index);
    cute::clear(probabilities);
    advance(index + 1, work_, input_.read_step(index + 2));
  }

  // after: what is told behind the next tile.
  __device__ __forceinline__ void advance(unsigned index, unsigned work, const ForwardStep& after) {
    tile_ = next_;
    next_ = after;
    index_ = index;
    work_ = work;
    if constexpr (cuda::has_bias_alone(kFeatures))
      if (!next_.has(ForwardStep::kEnd)) scores_.load_bias(next_, of(work + next_.has(ForwardStep::kFirst)));
  }

  // (64 | columns of a product, sum, …, buffer) of Q, K and V.
  template <class Q, class K, class V>
  struct Operands {
    Q q;
    K k;
    V v;
  };
  __device__ __forceinline__ auto make_operands() const {
    auto q = cute::make_tensor(cute::make_smem_ptr(smem_.q), typename Traits::SmemQ::RowMajor{});
    auto k = cute::make_tensor(cute::make_smem_ptr(smem_.k), typename Traits::SmemK::RowMajor{});
    auto v = cute::make_tensor(cute::make_smem_ptr(smem_.v), typename Traits::SmemV::Transposed{});
    auto mine = cute::local_tile(q, Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDim>, Int<Traits::kStagesQ>>{},
                                 cute::make_coord(warpgroup_, 0, 0));
    auto a = operand_a<MmaScores>(mine);
    auto b = operand_b<MmaScores>(k);
    auto c = operand_b<MmaOut>(v);
    return Operands<decltype(a), decltype(b), decltype(c)>{a, b, c};
  }

  template <class Operands, class Accumulator>
  __device__ __forceinline__ void start_scores(const Operands& operands, Accumulator& acc, unsigned index,
                                               unsigned work) {
    using cute::_;
    start_gemm<MmaScores>(operands.q(_, _, _, Input::Queries::after(work).stage),
                          operands.k(_, _, _, Input::Keys::after(index).stage), acc, false);
  }
  template <class Operands, class Out, class Probabilities>
  __device__ __forceinline__ void start_out(const Operands& operands, Out& acc_out, Probabilities& probabilities,
                                            unsigned index) {
    using cute::_;
    const auto use = Input::Values::after(index);
    smem_.v_ring.wait_full(use);
    start_gemm<MmaOut>(as_operand_a(probabilities), operands.v(_, _, _, use.stage), acc_out,
                       !tile_.has(ForwardStep::kFirst));
  }
  template <class Out>
  __device__ __forceinline__ void finish_out(Out& acc_out, unsigned index) {
    cute::warpgroup_wait<0>();
    finished(acc_out);
    smem_.v_ring.release(Input::Values::after(index));
  }
  // Of the queries closed last, which work_ still counts: before advance().
  template <class Out>
  __device__ __forceinline__ void write_output(Out& acc_out) {
    scores_.normalize(acc_out, of(work_));
    scores_.write(acc_out, of(work_));
  }
  __device__ const ForwardWork& of(unsigned work) const { return input_.queries_of(work); }

  typename Traits::Smem& smem_;
  int warpgroup_, uncommon_;
  Input input_;
  Turn<Traits::kWarpgroups, Traits::kTurns> turn_;
  Scores scores_;
  ForwardStep tile_, next_;            // whose P·V comes next, and the one after it
  unsigned index_ = ~0u, work_ = ~0u;  // of tile_, counting tiles of keys, and of queries; before the first
};

}  // namespace flashsdk::sm90
