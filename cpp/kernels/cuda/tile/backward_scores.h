// From Sᵀ and dPᵀ to Pᵀ and dSᵀ in place: the element-wise half of the backward, the same on every architecture.
#pragma once

#include <limits>

#include "cuda/schedule/tile_scheduler.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/fragments.h"
#include "cuda/tile/masking.h"
#include "cuda/tile/score_stages.h"

namespace flashsdk::cuda {

// A value for each of a thread's queries: rows(j) has those of columns j and j + 1 of its accumulator, from a tile's
// rows in shared memory.
template <class Coordinates>
__device__ __forceinline__ auto rows_of_queries(const float* rows, const Coordinates& at) {
  return [rows, at](int j) { return *reinterpret_cast<const float2*>(rows + cute::get<1>(at(0, j))); };
}

// The same, of which those of the first kColumns columns are read when it is made: under products that run, so that
// nothing waits for shared memory later (docs/dev/sm90-backward.md, "Latencies").
template <int kColumns, class Coordinates>
class HeldRows {
 public:
  __device__ __forceinline__ HeldRows(const float* rows, const Coordinates& at) : rows_(rows), at_(at) {
    const int first = cute::get<1>(at(0, 0));
    const std::uint32_t address = cute::cast_smem_ptr_to_uint(rows + first);
    CUTE_UNROLL
    for (int j = 0; j < kColumns; j += 2) {
      asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(pairs_[j / 2].x), "=f"(pairs_[j / 2].y)
                   : "r"(address + static_cast<std::uint32_t>((cute::get<1>(at(0, j)) - first) * sizeof(float))));
    }
  }
  __device__ __forceinline__ float2 operator()(int j) const {
    return j < kColumns ? pairs_[j / 2] : rows_of_queries(rows_, at_)(j);
  }

 private:
  const float* rows_;
  Coordinates at_;
  float2 pairs_[kColumns / 2];
};

// The tops of a tile's rows, where it is marked (cuda/pass/backward_workspace.h). That it is marked is read at once,
// where they are when it is asked for: most tiles are not, and it takes no registers in between.
class TopOfTile {
 public:
  TopOfTile() = default;
  __device__ __forceinline__ explicit TopOfTile(const float* const& place)
      : place_(&place), marked_(place != nullptr) {}
  __device__ __forceinline__ bool marked() const { return marked_; }
  __device__ __forceinline__ const float* rows() const { return *place_; }

 private:
  const float* const* place_ = nullptr;
  bool marked_ = false;
};

// Matrices are (keys, queries) views of a thread's accumulators, `at` the (row, column) of their elements in the tile,
// lse_log2 and minus_delta give the values of its queries. kWholeCalls: see for_each_kept_transposed().
template <int kBlockM, int kBlockN, class Policy, Features kFeatures, bool kWholeCalls = false>
class BackwardScores {
  static_assert(!kHasScore<Policy> || has_softcap(kFeatures), "where a policy's scores are asked for");

 public:
  __device__ BackwardScores(const BackwardParams& p, const SeqlenInfo& seq, const TileWork& work)
      : p_(p),
        seq_(seq),
        batch_(work.batch),
        n0_(work.block * kBlockN),
        keys_end_here_(n0_ + kBlockN > seq.seqlen_k),
        modified_(kHasScore<Policy> || (modifies_scores(kFeatures) && ScoreFeatures::any(p.score))),
        scale_((modified_  ? 1.f
                : halved() ? 0.5f * p.score.softmax_scale
                           : p.score.softmax_scale) *
               kLog2e),
        dropout_scale_(has_dropout(kFeatures) ? p.score.dropout.scale() : 1.f) {
    if constexpr (has_dropout(kFeatures)) rng_ = DropoutRng(p.score.dropout, work.batch);
  }

  __device__ int first_key() const { return n0_; }
  __device__ int batch() const { return batch_; }
  __device__ DropoutRng rng(int head) const { return rng_.of(head); }

  // Where ALiBi is the only feature. Slopes are divided by the softmax scale, as scores are products here: asked before
  // these are there, as the slope comes from memory.
  using Alibi = AlibiAlone<kFeatures>;
  __device__ Alibi alibi(int head) const { return Alibi(p_.score, seq_, batch_, head); }

  // Scores become probabilities, kept ones or not; hide() then makes 0 what the mask hides. addend: of a kernel in
  // which nothing else changes scores, alibi() or a tile of the bias.
  template <class Scores, class Coordinates, class Rows, class Addend = Alibi>
  __device__ void exponentials(Scores&& s, const Coordinates& at, TileRef tile, const Rows& lse_log2,
                               const TopOfTile& top, const Addend& addend = {}) const {
    if constexpr (has_bias_alone(kFeatures))
      addend.add(s, in_sequence(at, tile), p_.score.softmax_scale);
    else if constexpr (kFeatures == Features::kAlibi)
      addend.add(s, in_sequence(at, tile));
    branch_if(top.marked(), [&] {
      const float unit = unit_of_scores();
      for_each_loaded(s, at, top.rows(), [&](float& x, float row_top) { x = lowered(x, row_top, unit); });
    });
    for_each_pair(s, lse_log2, [&](int, int, float& x, float row_lse) { x = exp2_approx(fmaf(x, scale_, -row_lse)); });
  }
  template <class Probabilities, class Coordinates>
  __device__ void hide(Probabilities&& s, const Coordinates& at, int head, TileRef tile) const {
    branch_if(tile.partial || keys_end_here_, [&] {
      Policy policy(p_.mask, seq_, batch_, head);
      mask_tile<true>(s, at, policy, tile.partial, tile.index * kBlockM, n0_, seq_.seqlen_k, 0.f);
    });
  }

  // Both.
  template <class Scores, class Coordinates, class Rows, class Addend = Alibi>
  __device__ void probabilities(Scores&& s, const Coordinates& at, int head, TileRef tile, const Rows& lse_log2,
                                const TopOfTile& top, const Addend& addend = {}) const {
    exponentials(s, at, tile, lse_log2, top, addend);
    hide(s, at, head, tile);
  }

  template <class Probabilities, class Gradients, class Rows>
  __device__ void gradients(const Probabilities& p, Gradients&& dp, const Rows& minus_delta) const {
    for_each_pair(dp, minus_delta,
                  [&](int i, int j, float& x, float row) { x = static_cast<float>(p(i, j)) * (x + row); });
  }

  // The same for kernels that hold P as well, as the fragment ((2, 2), M, N) of 16 bits that weighs dO. Where dropout
  // is the only feature, both lose what is dropped. By 16 queries, so that no more of `weights` is there beside p than
  // is being drawn for, and no mask has to be kept.
  template <class Fragment, class Probabilities, class Gradients, class Coordinates, class Rows>
  __device__ void gradients(Fragment& weights, const Probabilities& p, Gradients&& dp, const Coordinates& at, int head,
                            TileRef tile, const Rows& minus_delta) const {
    auto pairs = cute::recast<std::uint32_t>(weights);  // ((1, 2), M, N)
    auto pair_at = [&](int i, int j) -> std::uint32_t& { return pairs(cute::make_coord(0, i % 2), i / 2, j / 2); };
    CUTE_UNROLL
    for (int first = 0; first < kExtent<Gradients, 1>; first += 4) {
      CUTE_UNROLL
      for (int j = first; j < first + 4; j += 2) {
        CUTE_UNROLL
        for (int i = 0; i < kExtent<Gradients, 0>; ++i) {
          pair_at(i, j) = pack<typename Fragment::value_type>(p(i, j), p(i, j + 1));
        }
      }
      if constexpr (has_dropout(kFeatures)) {
        drop<4>(first, dp, at, head, tile, [&](int i, int j, std::uint32_t mask) { pair_at(i, j) &= mask; });
      } else {
        end_block();
      }
      CUTE_UNROLL
      for (int j = first; j < first + 4; j += 2) {
        const float2 row = minus_delta(j);
        CUTE_UNROLL
        for (int i = 0; i < kExtent<Gradients, 0>; ++i) {
          dp(i, j) = p(i, j) * fmaf(dp(i, j), dropout_scale_, row.x);
          dp(i, j + 1) = p(i, j + 1) * fmaf(dp(i, j + 1), dropout_scale_, row.y);
        }
      }
    }
  }

  // The same for kernels with dropout and without softcap, with its factors m (DropFactors), which
  // drawn.for_each_pair(f) tells for all (i, j): dS = P∘(m∘dP·dropout_scale_ − δ). Then P, which weighs dO, loses what
  // is dropped.
  template <class Probabilities, class Gradients, class Rows, class Drawn>
  __device__ void gradients(Probabilities&& p, Gradients&& dp, const Rows& minus_delta, const Drawn& drawn) const {
    drawn.for_each_pair([&](int i, int j, std::uint32_t factors) {
      const float2 row = minus_delta(j), kept = __half22float2(reinterpret_cast<const __half2&>(factors));
      dp(i, j) = p(i, j) * fmaf(dp(i, j) * kept.x, dropout_scale_, row.x);
      dp(i, j + 1) = p(i, j + 1) * fmaf(dp(i, j + 1) * kept.y, dropout_scale_, row.y);
      p(i, j) *= kept.x;
      p(i, j + 1) *= kept.y;
    });
  }

  // Both steps, with the features. Returns what dropout keeps, to be applied to the P that weighs dO.
  template <class Scores, class Gradients, class Coordinates, class LseRows, class DeltaRows, class BiasTile>
  __device__ auto featured(Scores&& s, Gradients&& dp, const Coordinates& at, int head, TileRef tile,
                           const LseRows& lse_log2, const DeltaRows& minus_delta, const TopOfTile& top,
                           const BiasTile& bias) const {
    const auto kept = drop_and_keep(dp, at, head, tile);
    for_each_pair(dp, minus_delta, [&](int, int, float& x, float row) { x = fmaf(x, dropout_scale_, row); });
    modify(s, dp, at, head, tile, top, bias);
    probabilities(s, at, head, tile, lse_log2, top);
    for_each_element(dp, [&](int i, int j, float& x) { x *= s(i, j); });
    return kept;
  }

  // The same in two places. Where the scores are: they become probabilities, and `factor` the derivative of softcap, in
  // units of 1 / kFactorOne. Returns what dropout keeps.
  template <class Scores, class Factor, class Coordinates, class Rows>
  __device__ auto featured_probabilities(Scores&& s, Factor&& factor, const Coordinates& at, int head, TileRef tile,
                                         const Rows& lse_log2, const TopOfTile& top) const {
    const auto kept = drop_and_keep(factor, at, head, tile);
    for_each_element(factor, [](int, int, float& x) { x = kFactorOne; });
    modify(s, factor, at, head, tile, top, NoBiasTile());
    probabilities(s, at, head, tile, lse_log2, top);
    return kept;
  }
  // Where dP is: p holds the probabilities times that factor, negative where they are dropped.
  template <class Probabilities, class Gradients, class Rows>
  __device__ void featured_gradients(const Probabilities& p, Gradients&& dp, const Rows& minus_delta) const {
    const float dropout_scale = p_.score.dropout.scale();
    for_each_pair(dp, minus_delta, [&](int i, int j, float& x, float row) {
      const float weight = static_cast<float>(p(i, j));
      x = fabsf(weight) * (1.f / kFactorOne) * fmaf(x, weight < 0.f ? 0.f : dropout_scale, row);
    });
  }

  // For sums over a row: final scores, whose exponents they are apart by a positive factor; hidden ones are −inf. `top`
  // is their maximum times sign().
  template <class Scores, class Coordinates>
  __device__ void finish_scores(Scores& s, const Coordinates& at, int head, TileRef tile) const {
    if constexpr (has_bias_alone(kFeatures)) {
      ScoreFeatures(p_.score, seq_, batch_, head).add_bias(s, in_sequence(at, tile), p_.score.softmax_scale);
    } else {
      auto unused = cute::make_tensor_like(s);
      modify(s, unused, at, head, tile, TopOfTile(), NoBiasTile());
      if constexpr (kFeatures == Features::kAlibi) alibi(head).add(s, in_sequence(at, tile));
    }
    for_each_element(s, [&](int, int, float& x) { x *= sign(); });
    const Policy policy(p_.mask, seq_, batch_, head);
    mask_tile<true>(s, at, policy, tile.partial, tile.index * kBlockM, n0_, seq_.seqlen_k, -INFINITY);
  }
  __device__ float sign() const { return scale_ < 0.f ? -1.f : 1.f; }
  // Of a sink over a finished score the difference in units of log2.
  __device__ float exponent_of(float sink, float score) const {
    return fmaf(-unit_of_scores() * score, factor(), sink * kLog2e);
  }
  // Of two finished scores likewise.
  __device__ float exponent(float score, float top) const { return lowered(score, top, unit_of_scores()) * factor(); }

 private:
  // Probabilities times the derivative are handed over in 16 bits, and where softcap is far exceeded are too small for
  // fp16: as multiples of 2⁻¹⁴ they have as many digits as the dS that they become. P may be up to 4 then.
  static constexpr float kFactorOne = 16384.f;

  // Of finished scores. A scale of 0, which would make a hidden one NaN, is the smallest number: of scores up to the
  // largest it makes less than 1e-6.
  __device__ float factor() const { return fmaxf(fabsf(scale_), std::numeric_limits<float>::denorm_min()); }
  // A scale beyond the limit is halved: all tiles are marked then, and scores doubled.
  __device__ bool halved() const { return !modified_ && fabsf(p_.score.softmax_scale) >= kScaleLimit; }
  __device__ float unit_of_scores() const { return halved() ? 2.f : 1.f; }
  static __device__ float lowered(float score, float top, float unit) {
    const float difference = unit * (score - top);
    return top == INFINITY ? 0.f : difference;
  }

  // Zeroes the gradients of what is dropped, in kColumns columns. f(i, j, mask): see for_each_kept_transposed().
  template <int kColumns, class Gradients, class Coordinates, class F>
  __device__ void drop(int first, Gradients& dp, const Coordinates& at, int head, TileRef tile, F&& f) const {
    const DropoutParam& dropout = p_.score.dropout;
    branch_if(dropout.threshold > 0, [&] {
      const DropoutRng rng = this->rng(head);
      CUTE_UNROLL
      for (int j = first; j < first + kColumns; j += 4) {
        for_each_kept_transposed<kWholeCalls, Gradients>(j, at, rng, dropout.threshold, tile.index * kBlockM, n0_,
                                                         [&](int i, int j, std::uint32_t mask) {
                                                           drop_floats(dp(i, j), dp(i, j + 1), mask);
                                                           f(i, j, mask);
                                                         });
      }
    });
  }
  // The same in all of them, and tells what is kept.
  template <class Gradients, class Coordinates>
  __device__ auto drop_and_keep(Gradients& dp, const Coordinates& at, int head, TileRef tile) const {
    constexpr int kColumns = kExtent<Gradients, 1>;
    KeptPairs<kExtent<Gradients, 0> * kColumns / 2> kept;
    drop<kColumns>(0, dp, at, head, tile,
                   [&](int i, int j, std::uint32_t mask) { kept.set((i * kColumns + j) / 2, mask); });
    return kept;
  }
  // From coordinates in the tile to those in the sequence.
  template <class Coordinates>
  __device__ TileCoordinates<true, Coordinates> in_sequence(const Coordinates& at, TileRef tile) const {
    return {at, tile.index * kBlockM, n0_};
  }
  // Softcap, bias, ALiBi and the policy's own, and the derivative.
  template <class Scores, class Gradients, class Coordinates, class BiasTile>
  __device__ void modify(Scores& s, Gradients& dp, const Coordinates& at, int head, TileRef tile, const TopOfTile& top,
                         const BiasTile& bias) const {
    if constexpr (has_softcap(kFeatures)) {
      branch_if(modified_, [&] {
        if (top.marked()) {  // a NaN that does not count would get into the derivative
          for_each_loaded(s, at, top.rows(), [](float& x, float row_top) { x = row_top == INFINITY ? 0.f : x; });
        }
        ScoreStages<kFeatures, Policy>(p_, seq_, batch_, head)
            .apply(s, dp, [&] { return in_sequence(at, tile); }, bias);
      });
    }
  }

  // f(i, j, element, value of its query); a lane's queries come in neighbouring pairs.
  template <class Matrix, class Rows, class F>
  static __device__ void for_each_pair(Matrix& matrix, const Rows& rows, F&& f) {
    CUTE_UNROLL
    for (int j = 0; j < cute::size<1>(matrix); j += 2) {
      const float2 pair = rows(j);
      CUTE_UNROLL
      for (int i = 0; i < cute::size<0>(matrix); ++i) {
        f(i, j, matrix(i, j), pair.x);
        f(i, j + 1, matrix(i, j + 1), pair.y);
      }
    }
  }

  // f(element, value of its query) with values in device memory. Few at a time: each piece's own branch, and loads that
  // stay in it, keep them from piling up in registers that all tiles would then lack.
  template <class Matrix, class Coordinates, class F>
  static __device__ void for_each_loaded(Matrix& matrix, const Coordinates& at, const float* rows, F&& f) {
    constexpr int kAtOnce = 4;
    const float* lane_rows =
        rows + opaque(static_cast<int>(cute::get<1>(at(0, 0))));  // nothing ahead of the loop over tiles
    CUTE_UNROLL
    for (int first = 0; first < cute::size<1>(matrix); first += kAtOnce) {
      branch_if(rows != nullptr, [&] {
        CUTE_UNROLL
        for (int j = first; j < min_of(first + kAtOnce, static_cast<int>(cute::size<1>(matrix))); j += 2) {
          float2 pair;
          asm volatile("ld.global.v2.f32 {%0, %1}, [%2];"
                       : "=f"(pair.x), "=f"(pair.y)
                       : "l"(lane_rows + (cute::get<1>(at(0, j)) - cute::get<1>(at(0, 0)))));
          CUTE_UNROLL
          for (int i = 0; i < cute::size<0>(matrix); ++i) {
            f(matrix(i, j), pair.x);
            f(matrix(i, j + 1), pair.y);
          }
        }
      });
    }
  }

  const BackwardParams& p_;
  const SeqlenInfo& seq_;
  int batch_, n0_;
  bool keys_end_here_;
  bool modified_;  // scores are not in the unit of products: scaled, and more
  float scale_, dropout_scale_;
  DropoutRng rng_;  // of head 0
};

}  // namespace flashsdk::cuda
