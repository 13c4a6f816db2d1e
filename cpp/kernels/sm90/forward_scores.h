// What the forward does to a tile of scores between the two products, and to the output after the last.
#pragma once

#include "common/kernel_entry.h"
#include "cuda/dropout.h"
#include "cuda/masking.h"
#include "cuda/score_features.h"
#include "cuda/softmax.h"
#include "sm90/forward_traits.h"
#include "sm90/gemm.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

template <class Traits, class Policy, cuda::Features kFeatures>
class ForwardScores {
  using Element = typename Traits::Element;
  static constexpr int kRows = 2;  // a thread's rows of its warpgroup's 64
  using Softmax = cuda::OnlineSoftmax<kRows>;
  using Visible = cuda::VisibleColumns<kRows, Traits::kBlockN / 4>;

 public:
  // What the output so far is to be multiplied by: to fit the maximum of the newest tile, or, when that has other
  // queries, to be finished.
  struct Factors {
    float row[kRows];
    bool needed = false;

    template <class Out>
    __device__ void apply(Out& acc_out) const {
      auto out = as_matrix(acc_out);
      if constexpr (Traits::kTries) {
        cuda::branch_if(needed, [&] { Softmax::rescale(out, row); });
      } else {
        Softmax::rescale(out, row);
      }
    }
  };

  __device__ ForwardScores(const ForwardParams& p, int warpgroup)
      : p_(p),
        warpgroup_(warpgroup),
        scale_first_((cuda::modifies_scores(kFeatures) && p.score.softcap > 0.f) ||
                     !cuda::scales_exponents(p.score.softmax_scale)),
        softmax_(unit() * cuda::kLog2e),
        closed_(softmax_) {}

  // What the mask leaves of a tile that it cuts: found while its scores are computed.
  __device__ Visible visible(const KeyTile& tile, const QueryTile& of) const {
    Visible visible;
    cuda::branch_if(masked(tile), [&] {
      auto find = [&](const auto& keys_of) {
        cuda::find_visible(visible, matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>(), keys_of,
                           tile.has(KeyTile::kPartial), m0(of), tile.n0, of.key_end);
      };
      if constexpr (Traits::kByWarpgroup) {
        find([&](int query) {
          query = max_of(query, 0);  // before the first, they see what it sees
          return KeyRange{query + of.diagonals.begin, query + of.diagonals.end};
        });
      } else {
        const SeqlenInfo seq(p_, of.batch);
        const Policy policy(p_.mask, seq, of.batch, of.head);
        find([&](int query) { return policy.keys_of(query); });
      }
    });
    return visible;
  }

  // Scores become probabilities, not yet divided by their sum. Most tiles do it by a maximum that they have not looked
  // for: that so far, or, if the queries are new, that of a few keys, of which a mask must not hide the first. Where
  // try_apply() fails, in some thread where the vote is deferred, else in all, the scores are lost and have to be
  // computed once more, for apply().
  __device__ bool can_try(const KeyTile& tile) const {
    if (!cuda::modifies_scores(kFeatures) && scale_first_) return false;  // rare: not worth its branch in every try
    const bool shows_first = Traits::kByWarpgroup && tile.has(KeyTile::kShowsFirst, warpgroup_);
    return tile.has(KeyTile::kFirst) ? !masked(tile) || shows_first : can_try_;
  }
  template <class Accumulator>
  __device__ bool try_apply(Accumulator& acc, Factors& factors, const KeyTile& tile, const QueryTile& of,
                            const Visible& visible) {
    auto scores = as_matrix(acc);
    if constexpr (cuda::modifies_scores(kFeatures)) modify(scores, of);
    cuda::branch_if(tile.has(KeyTile::kFirst) || masked(tile), [&] {  // one jump over both
      mask(scores, tile, visible);
      cuda::branch_if(tile.has(KeyTile::kFirst), [&] {
        close(factors);
        softmax_.restart_by_some(scores);
      });
    });
    if constexpr (Traits::kDefersVote) {
      can_try_ = true;  // unless it is undone
      return softmax_.try_exponentiate(scores);
    } else {
      can_try_ = softmax_.try_exponentiate(scores, [&](bool holds) { return everywhere(holds); });
      return can_try_;
    }
  }
  __device__ void undo_try() { softmax_.undo_try(); }
  // Waits for all threads of the warpgroup.
  __device__ void meet() const { barrier_sync(named_barrier::kForwardVote + warpgroup_, kWarpgroup); }
  // tried: by try_apply(), which has closed the queries before.
  template <class Accumulator>
  __device__ void apply(Accumulator& acc, Factors& factors, const KeyTile& tile, const QueryTile& of,
                        const Visible& visible, bool tried) {
    auto scores = as_matrix(acc);
    modify(scores, of);
    mask(scores, tile, visible);
    float tile_max[kRows];
    Softmax::find_max(scores, tile_max);
    factors.needed = true;
    if (tile.has(KeyTile::kFirst)) {
      if (!tried) close(factors);
      softmax_.restart(tile_max);
    } else {
      softmax_.raise(tile_max, factors.row);
    }
    exponentiate(scores);
  }

  // The very first tile.
  template <class Accumulator>
  __device__ void start(Accumulator& acc, const KeyTile& tile, const QueryTile& of) {
    auto scores = as_matrix(acc);
    modify(scores, of);
    mask(scores, tile, visible(tile, of));
    float tile_max[kRows];
    Softmax::find_max(scores, tile_max);
    softmax_.restart(tile_max);
    exponentiate(scores);
  }

  // Ends the softmax of the queries so far; the factors divide by the row sums.
  __device__ void close(Factors& factors) {
    const float dropout_scale = cuda::has_dropout(kFeatures) ? p_.score.dropout.scale() : 1.f;
    softmax_.finish();
    closed_ = softmax_;
    factors.needed = true;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) factors.row[i] = softmax_.inverse_sum(i) * dropout_scale;
  }

  // The probabilities as 16-bit operand of the second product, without what dropout drops.
  template <class Accumulator, class Probabilities>
  __device__ void keep(const Accumulator& acc, Probabilities& probabilities, const KeyTile& tile,
                       const QueryTile& of) const {
    auto converted = convert<Element>(acc);
    if constexpr (cuda::has_dropout(kFeatures)) {
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
        auto atoms = as_atoms(converted);
        const DropoutRng rng(p_.score.dropout, of.batch * p_.num_heads + of.head);
        cuda::drop_elements(atoms, matrix_coordinates<typename Traits::MmaScores, Traits::kBlockN>(), rng,
                            p_.score.dropout.threshold, m0(of), tile.n0);
      });
    }
    cuda::copy_words(converted, probabilities);
  }

  // The output and the log-sum-exp of the queries closed last.
  template <class Out>
  __device__ void write(const Out& acc_out, const QueryTile& of) const {
    const SeqlenInfo seq(p_, of.batch);
    const int first = m0(of), begin = Traits::kFromEnd ? -first : 0, end = seq.seqlen_q - first;
    auto coordinates = matrix_coordinates<typename Traits::MmaOut, 16>();
    float* lse = seq.rows(p_.lse, of.batch, of.head) + first * p_.lse.row;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = cute::get<0>(coordinates(i, 0));
      if (threadIdx.x % 4 == 0 && row >= begin && row < end) lse[row * p_.lse.row] = closed_.lse(i, unit());
    }
    Element* target = seq.head_q<Element>(p_.out, of.batch, of.head) + first * p_.out.row;
    store_accumulator<Traits::kWholeStores>(convert<Element>(acc_out), target, p_.out.row, begin, end, p_.head_dim_v);
  }

 private:
  template <class Scores>
  __device__ void exponentiate(Scores& scores) {
    softmax_.exponentiate(scores);
    if constexpr (Traits::kTries) can_try_ = everywhere(softmax_.can_try());
  }
  // Of the warpgroup, which starts its products together.
  __device__ bool everywhere(bool mine) const {
    return barrier_all(named_barrier::kForwardVote + warpgroup_, kWarpgroup, mine);
  }

  // Softcap, or a scale that the exponents cannot take.
  template <class Scores>
  __device__ void modify(Scores& scores, const QueryTile& of) const {
    cuda::branch_if(scale_first_, [&] {
      if constexpr (cuda::modifies_scores(kFeatures)) {
        const SeqlenInfo seq(p_, of.batch);
        cuda::ScoreFeatures(p_.score, seq, of.batch, of.head).cap(scores);
      } else {
        cuda::for_each_element(scores, [&](int, int, float& s) { s *= p_.score.softmax_scale; });
      }
    });
  }
  template <class Scores>
  __device__ void mask(Scores& scores, const KeyTile& tile, const Visible& visible) const {
    cuda::branch_if(masked(tile), [&](unsigned zero) { visible.hide_others(scores, zero); });
  }

  // From the scores that the softmax sees to natural logarithms.
  __device__ float unit() const { return scale_first_ ? 1.f : p_.score.softmax_scale; }
  __device__ int m0(const QueryTile& of) const { return of.m0 + warpgroup_ * kWarpgroupRows; }
  __device__ bool masked(const KeyTile& tile) const {
    return tile.has(KeyTile::kMasked, Traits::kByWarpgroup ? warpgroup_ : 0);
  }

  const ForwardParams& p_;
  bool can_try_ = false;
  int warpgroup_;
  bool scale_first_;
  Softmax softmax_;
  Softmax closed_;  // of the queries before, until their output is written
};

}  // namespace flashsdk::sm90
