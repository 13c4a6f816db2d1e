// What the forward does to a tile of scores between the two products, and to the output after the last.
#pragma once

#include "common/kernel_entry.h"
#include "cuda/tile/bias_tile.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/masking.h"
#include "cuda/tile/score_stages.h"
#include "cuda/tile/softmax.h"
#include "sm90/forward/traits.h"
#include "sm90/gemm.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

// Of a warpgroup's queries, each warp its own 16: no warp waits for another.
template <class Traits, cuda::Features kFeatures>
using ForwardBias = std::conditional_t<
    cuda::has_bias_alone(kFeatures),
    cuda::BiasTile<typename Traits::Element, kWarpgroupRows, Traits::kBlockN, kWarpgroup, kWarpgroup / 32, true>,
    cuda::NoBiasTile>;
// Shared memory with a place for each warpgroup's, where there is one.
template <class Traits, cuda::Features kFeatures, int kBytes = ForwardBias<Traits, kFeatures>::kBytes>
struct ForwardSmem : Traits::Smem {
  alignas(16) char bias[Traits::kWarpgroups][kBytes];
  __device__ char* bias_of(int warpgroup) { return bias[warpgroup]; }
};
template <class Traits, cuda::Features kFeatures>
struct ForwardSmem<Traits, kFeatures, 0> : Traits::Smem {
  __device__ char* bias_of(int) { return nullptr; }
};

template <class Traits, class Policy, cuda::Features kFeatures>
class ForwardScores {
  static_assert(!kHasScore<Policy> || kFeatures == cuda::Features::kCapped, "where a policy's scores are asked for");
  using Element = typename Traits::Element;
  static constexpr int kRows = 2;  // a thread's rows of its warpgroup's 64
  using Softmax = cuda::OnlineSoftmax<kRows>;

 public:
  using Visible = cuda::VisibleColumns<kRows, Traits::kBlockN / 4>;
  using Alibi = cuda::AlibiAlone<kFeatures>;
  using Bias = ForwardBias<Traits, kFeatures>;
  using Factors = float[kRows];

  // bias: of this warpgroup, in shared memory.
  __device__ ForwardScores(const ForwardParams& p, char* bias, int warpgroup)
      : p_(p),
        bias_(bias),
        warpgroup_(warpgroup),
        unit_(p.score, kHasScore<Policy> || kBiasAlone || (cuda::modifies_scores(kFeatures) && p.score.softcap > 0.f)),
        softmax_(cuda::warp_uniform(unit_.to_log2())),  // as an operand it is then in no register of a thread
        closed_(softmax_) {}

  // What the mask leaves of a tile that it cuts: found while its scores are computed.
  __device__ Visible visible(const ForwardStep& tile, const ForwardWork& of) const {
    Visible visible;
    cuda::branch_if(masked(tile), [&] {
      if constexpr (!kHasDiagonals<Policy>) {
        const SeqlenInfo seq = of.sequence;
        cuda::ask_visible(visible, matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>(),
                          Policy(p_.mask, seq, of.batch, of.head), tile.has(ForwardStep::kPartial), m0(of), tile.n0,
                          of.key_end);
        return;
      }
      const auto keys_of = [&](int query) {
        query = max_of(query, 0);  // before the first, they see what it sees
        return KeyRange{query + of.diagonals.begin, query + of.diagonals.end};
      };
      cuda::find_visible(visible, matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>(), keys_of,
                         tile.has(ForwardStep::kPartial), m0(of), tile.n0, of.key_end);
    });
    return visible;
  }

  __device__ Alibi alibi(const ForwardWork& of) const {
    if constexpr (cuda::has_alibi(kFeatures)) {
      return Alibi(of.alibi_slope, of.sequence);
    } else {
      return {};
    }
  }

  // Starts the copy of a tile's bias, which wait_for_bias() ends: also of one that is passed over, as what follows goes
  // to the same place. The warp has added the one before.
  __device__ void load_bias(const ForwardStep& tile, const ForwardWork& of) const {
    if constexpr (kBiasAlone) {
      __syncwarp();
      const SeqlenInfo seq = of.sequence;
      Bias(p_.score, seq, of.batch, of.head, bias_).load(m0(of), tile.n0);
      cute::cp_async_fence();
    }
  }
  // Ahead of a wait for products: racecheck takes that for what brings lanes together (docs/dev/gpu.md).
  __device__ void wait_for_bias() const {
    if constexpr (kBiasAlone) {
      cute::cp_async_wait<0>();
      __syncwarp();
    }
  }

  // Whether the next tile may be tried, if it is not the first of its queries.
  __device__ bool can_try() const { return can_try_; }
  // Scores become probabilities, not yet divided by their sum. Two functions do it:
  //   try_apply()   by a maximum that nobody looked for: the one so far. New queries take that of a few keys (with
  //                 ALiBi, of all), of which a mask must not hide the first. Most tiles end here.
  //   apply()       by the larger of the maximum so far and the tile's: where kTries is off, where no try can be made,
  //                 or after one that failed, for which the scores are computed once more.
  // A try is false, in the whole warpgroup, where one thread's sum fails or where none can be made. kCommon: the tile
  // is neither masked nor the first of its queries. A first one closes the queries before, also where it returns false.
  template <bool kCommon, class Accumulator>
  __device__ bool try_apply(Accumulator& acc, const ForwardStep& tile, const ForwardWork& of, const Visible& visible,
                            const Alibi& alibi) {
    auto scores = as_matrix(acc);
    if constexpr (!kCommon) {
      if (!can_try(tile)) {
        if (tile.has(ForwardStep::kFirst)) close();
        return false;
      }
    }
    const auto exponentiate = [&](const auto& of_row) {
      can_try_ =
          softmax_.template try_exponentiate<Element>(scores, of_row, [&](bool holds) { return everywhere(holds); });
      return can_try_;
    };
    if constexpr (cuda::modifies_scores(kFeatures)) modify<true>(scores, tile, of);
    if constexpr (cuda::has_alibi(kFeatures) && kCommon) {
      float of_row[kRows];  // of a common tile all keys are on one side: KeyLoader::has_diagonal()
      alibi.add_on_one_side(scores, coordinates_of(tile, of),
                            alibi.before_diagonal(m0(of) + kWarpgroupRows - 1, tile.n0), of_row);
      return exponentiate(of_row);
    }
    if constexpr (cuda::has_alibi(kFeatures)) alibi.add(scores, coordinates_of(tile, of));
    if constexpr (!kCommon) {
      cuda::branch_if(tile.has(ForwardStep::kFirst) || masked(tile), [&] {  // one jump over both
        mask(scores, tile, visible);
        cuda::branch_if(tile.has(ForwardStep::kFirst), [&] {
          close();
          if constexpr (cuda::has_alibi(kFeatures))
            softmax_.restart_by_all(scores);
          else
            softmax_.restart_by_some(scores);
        });
      });
    }
    return exponentiate(nullptr);
  }
  // factors: what the output so far is to be multiplied by, if it is of these queries. With kTries a first tile's
  // queries before have been closed by try_apply(); the very first tile has none.
  template <bool kCommon, class Accumulator>
  __device__ void apply(Accumulator& acc, Factors& factors, const ForwardStep& tile, const ForwardWork& of,
                        const Visible& visible, const Alibi& alibi) {
    auto scores = as_matrix(acc);
    modify(scores, tile, of);
    if constexpr (cuda::has_alibi(kFeatures)) alibi.add(scores, coordinates_of(tile, of));
    if constexpr (!kCommon) mask(scores, tile, visible);
    float tile_max[kRows];
    Softmax::find_max(scores, tile_max);
    if (!kCommon && tile.has(ForwardStep::kFirst)) {
      if constexpr (!Traits::kTries) close();
      softmax_.restart(tile_max);
    } else {
      softmax_.raise(tile_max, factors);
    }
    softmax_.exponentiate(scores);
    if constexpr (Traits::kTries) can_try_ = may_try() && everywhere(softmax_.can_try());
  }

  // Ends the softmax of the queries so far.
  __device__ void close() {
    softmax_.finish();
    closed_ = softmax_;
  }
  // The output of the queries closed last is divided by the row sums. Where a sink joins them, the maximum that is kept
  // becomes the log-sum-exp: ahead of write().
  template <class Out>
  __device__ void normalize(Out& acc_out, const ForwardWork& of) {
    const float dropout_scale = cuda::has_dropout(kFeatures) ? cuda::scale_of_kept<Element>(p_.score.dropout) : 1.f;
    Factors factors;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) factors[i] = closed_.inverse_sum(i) * dropout_scale;
    cuda::branch_if(has_sink(), [&] {
      const auto at = matrix_coordinates<typename Traits::MmaOut, 16>();
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int query = m0(of) + cute::get<0>(at(i, 0)), row = clamp_index(query, of.sequence.seqlen_q - 1);
        factors[i] = closed_.join_sink(i, unit_.to_natural(), *p_.sink.of(of.head, row)) * dropout_scale;
      }
    });
    rescale(acc_out, factors);
  }
  template <class Out>
  static __device__ void rescale(Out& acc_out, const Factors& factors) {
    auto out = as_matrix(acc_out);
    Softmax::rescale(out, factors);
  }

  // The probabilities as 16-bit operand of the second product, without what dropout drops.
  template <class Accumulator, class Probabilities>
  __device__ void keep(const Accumulator& acc, Probabilities& probabilities, const ForwardStep& tile,
                       const ForwardWork& of) {
    auto converted = convert<Element>(acc);
    if constexpr (cuda::has_dropout(kFeatures)) {
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
        auto atoms = as_atoms(converted);
        if (tile.has(ForwardStep::kFirst)) rng_ = DropoutRng(p_.score.dropout, of.batch).of(of.head);
        cuda::drop_elements(atoms, matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>(), rng_,
                            p_.score.dropout.threshold, m0(of), tile.n0);
      });
    }
    cuda::copy_words(converted, probabilities);
  }

  // The epilogue: the output and the log-sum-exp of the queries closed last.
  template <class Out>
  __device__ void write(const Out& acc_out, const ForwardWork& of) const {
    const SeqlenInfo seq = of.sequence;
    const int first = m0(of), begin = Traits::kFromEnd ? -first : 0, end = seq.seqlen_q - first;
    write_lse(seq.rows(p_.lse, of.batch, of.head) + first * p_.lse.row, begin, end);
    Element* target = seq.head_q<Element>(p_.out, of.batch, of.head) + first * p_.out.row;
    if constexpr (Traits::kStoresAtOnce)
      store_accumulator_at_once(convert<Element>(acc_out), target, p_.out.row, end, p_.head_dim_v);
    else
      store_accumulator(convert<Element>(acc_out), target, p_.out.row, begin, end, p_.head_dim_v);
  }

 private:
  __device__ bool can_try(const ForwardStep& tile) const {
    if (!tile.has(ForwardStep::kFirst)) return can_try_;
    return may_try() && (!masked(tile) || tile.has(ForwardStep::kShowsFirst, warpgroup_));
  }
  // In the warpgroup, which starts its products together. That all lanes hear the same, the barrier does not tell the
  // compiler.
  __device__ bool everywhere(bool mine) const {
    return __all_sync(0xffffffffu, barrier_all(named_barrier::kForwardVote + warpgroup_, kWarpgroup, mine));
  }

  // Of four lanes with the same two rows, the first computes one's and the second the other's: at once, and without a
  // branch, as the logarithm is a long chain that nothing hides.
  __device__ void write_lse(float* lse, int begin, int end) const {
    static_assert(kRows == 2);
    const int lane_of_quad = threadIdx.x % 4;
    const bool second = threadIdx.x % 2 != 0;
    const auto at = matrix_coordinates<typename Traits::MmaOut, 16>();
    const int row = second ? cute::get<0>(at(1, 0)) : cute::get<0>(at(0, 0));
    const float max = second ? closed_.max(1) : closed_.max(0);
    const float value =  // normalize() has been there
        has_sink() ? max : cuda::log_sum_exp(max, second ? closed_.sum(1) : closed_.sum(0), unit_.to_natural());
    if (lane_of_quad < kRows && row >= begin && row < end) lse[row * p_.lse.row] = value;
  }

  // A bias, softcap, the policy's own, or a scale that the exponents cannot take. kTried: for a try.
  template <bool kTried = false, class Scores>
  __device__ void modify(Scores& scores, const ForwardStep& tile, const ForwardWork& of) const {
    if constexpr (kBiasAlone) {
      const SeqlenInfo seq = of.sequence;
      Bias(p_.score, seq, of.batch, of.head, bias_)
          .template add<kTried>(scores, coordinates_of(tile, of), p_.score.softmax_scale);
    } else {
      cuda::branch_if(unit_.scale_first(), [&] {
        if constexpr (cuda::modifies_scores(kFeatures)) {
          const SeqlenInfo seq = of.sequence;
          cuda::ScoreStages<kFeatures, Policy>(p_, seq, of.batch, of.head)
              .apply(scores, [&] { return coordinates_of(tile, of); }, cuda::NoBiasTile());
        } else {
          cuda::for_each_element(scores, [&](int, int, float& s) { s *= p_.score.softmax_scale; });
        }
      });
    }
  }
  // Of the warpgroup's scores.
  __device__ auto coordinates_of(const ForwardStep& tile, const ForwardWork& of) const {
    const auto local = matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>();
    return cuda::TileCoordinates<false, decltype(local)>{local, m0(of), tile.n0};
  }
  template <class Scores>
  __device__ void mask(Scores& scores, const ForwardStep& tile, const Visible& visible) const {
    cuda::branch_if(masked(tile), [&](unsigned zero) { visible.hide_others(scores, zero); });
  }

  __device__ bool has_sink() const { return p_.sink.ptr != nullptr; }
  __device__ int m0(const ForwardWork& of) const { return of.m0 + warpgroup_ * kWarpgroupRows; }
  __device__ bool masked(const ForwardStep& tile) const { return tile.has(ForwardStep::kMasked, warpgroup_); }
  // A scale that the exponents cannot take is rare: not worth its branch in every try.
  __device__ bool may_try() const { return cuda::modifies_scores(kFeatures) || !unit_.scale_first(); }

  static constexpr bool kBiasAlone = cuda::has_bias_alone(kFeatures);
  const ForwardParams& p_;
  char* bias_;  // of this warpgroup, in shared memory
  bool can_try_ = false;
  int warpgroup_;
  cuda::ScoreUnit unit_;
  Softmax softmax_;
  Softmax closed_;  // of the queries before, until their output is written
  DropoutRng rng_;  // of the queries at hand
};

}  // namespace flashsdk::sm90
