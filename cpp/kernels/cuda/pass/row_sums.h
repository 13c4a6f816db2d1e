// The sums of the softmax, taken anew for the backward where a float32 lse cannot say them (docs/numerics.md). It
// happens to large scores, and beside a sink to rows that may see nothing, so it is short rather than fast.
#pragma once

#include "cuda/pass/backward_passes.h"
#include "cuda/tile/backward_scores.h"

namespace flashsdk::cuda {

// Two elements of a row of `columns`, of any alignment; zeros behind its end, and where there is no row.
template <class Element>
__device__ __forceinline__ std::uint32_t load_pair(const Element* row, int column, int columns) {
  const auto* bits = reinterpret_cast<const std::uint16_t*>(row) + column;
  const std::uint32_t low = row != nullptr && column < columns ? bits[0] : 0;
  const std::uint32_t high = row != nullptr && column + 1 < columns ? bits[1] : 0;
  return low | high << 16;
}

// Product: the main kernel's Sᵀ = K·Qᵀ of kKeys keys and eight queries, by the same instruction in the same order. The
// sums must be those of the main kernel's scores: among scores of 1e9 their last bits decide between exp(0) and
// exp(64). A lane holds keys {k, k + 8} and queries {q, q + 1}, as in any 16 x 8 atom.
// kBlockM and kBlockN are the main kernel's.
template <class Product, int kBlockM, int kBlockN, class Policy, Features kFeatures>
class RowSums {
  using Element = typename Product::Element;
  static constexpr int kKeys = Product::kKeys, kQueries = 8;
  using Scores = BackwardScores<kQueries, kKeys, Policy, kFeatures>;
  static_assert(kBlockM % kQueries == 0 && kBlockN % kKeys == 0);

 public:
  static constexpr int kTileRows = kBlockM;

  // By a whole thread block, of one tile of queries: where lse_log2 is kTakenAnew it becomes the logarithm of the row's
  // sum, and top the row's maximum.
  template <int kThreads>
  static __device__ void take(const BackwardParams& p, const BackwardWorkspace& ws, const SeqlenInfo& seq, int m_block,
                              int head, int batch) {
    const std::int64_t tile = ws.tile<kTileRows>(p, seq, batch, head, m_block);
    const float (&lse_log2)[kTileRows] = ws.lse_of<kTileRows>(tile).lse_log2;
    const int first = m_block * kBlockM, end = min_of(first + kBlockM, seq.seqlen_q);
    for (int q0 = first + threadIdx.x / Product::kThreads * kQueries; q0 < end;
         q0 += kThreads / Product::kThreads * kQueries) {
      const int row = q0 + threadIdx.x % kQueries;
      if (__any_sync(0xffffffffu, row < end && lse_log2[row - first] == kTakenAnew) == 0) continue;
      float row_top[2], sum[2], sink[2];
      visit_keys(p, seq, m_block, q0, head, batch, row_top, sum, sink);
      const int mine = threadIdx.x % Product::kThreads;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = q0 + mine % 4 * 2 + i;
        if (mine < 4 && query < end && lse_log2[query - first] == kTakenAnew)
          write(ws, tile, query - first, row_top[i], sum[i], sink[i]);
      }
    }
  }

 private:
  // sink: of the sink, the difference to the top in units of log2; −inf where there is none.
  static __device__ void write(const BackwardWorkspace& ws, std::int64_t tile, int row, float top, float sum,
                               float sink) {
    const std::int64_t place = tile * ws.tile_rows + row;
    float& lse_log2 = ws.lse_of<kTileRows>(tile).lse_log2[row];
    if (sum != 0.f) {
      const float smaller = exp2_approx(-fabsf(sink)), total = sink > 0.f ? fmaf(sum, smaller, 1.f) : sum + smaller;
      ws.top[place] = top;
      lse_log2 = fmaxf(sink, 0.f) + log2f(total);
      if (ws.sink_terms != nullptr)
        ws.sink_terms[place] = ws.minus_delta[place] * (sink > 0.f ? 1.f : smaller) * reciprocal(total);
    } else {  // sees no key
      ws.top[place] = lse_log2 = INFINITY;
      ws.minus_delta[place] = 0.f;
    }
  }

  // The maximum and the sum of a lane's two queries over all keys they see.
  static __device__ void visit_keys(const BackwardParams& p, const SeqlenInfo& seq, int m_block, int q0, int head,
                                    int batch, float (&top)[2], float (&sum)[2], float (&sink)[2]) {
    const int head_kv = head / p.heads_per_group();
    const Element* keys = seq.head_k<const Element>(p.k, batch, head_kv);
    const Product product(seq.head_q<const Element>(p.q, batch, head) + q0 * p.q.row, p.q.row,
                          min_of(kQueries, seq.seqlen_q - q0), p.head_dim);
    float max[2] = {-INFINITY, -INFINITY};
    sum[0] = sum[1] = 0.f;
    TileWalk walk = Policy(p.mask, seq, batch, head).row_walk(Tile{kBlockM, kBlockN}, m_block);
    for (TileRef tile; walk.next(tile);) {
      const int tile_end = min_of((tile.index + 1) * kBlockN, seq.seqlen_k);
      for (int n0 = tile.index * kBlockN; n0 < tile_end; n0 += kKeys) {
        float acc[4];
        product.compute(keys + n0 * p.k.row, p.k.row, seq.seqlen_k - n0, acc);
        const Scores scores(p, seq, TileWork{n0 / kKeys, head_kv, batch});
        auto s = cute::make_tensor(&acc[0],
                                   cute::Layout<cute::Shape<cute::_2, cute::_2>, cute::Stride<cute::_2, cute::_1>>{});
        const auto at = [](int i, int j) {
          const int thread = threadIdx.x % Product::kThreads, lane = thread % 32;
          return cute::make_tuple(thread / 32 * 16 + lane / 4 + 8 * i, lane % 4 * 2 + j);
        };
        scores.finish_scores(s, at, head, TileRef{q0 / kQueries, tile.partial});
#pragma unroll
        for (int j = 0; j < 2; ++j) add(scores, max[j], sum[j], fmaxf(s(0, j), s(1, j)), s(0, j), s(1, j));
      }
    }
    const Scores scores(p, seq, TileWork{0, head_kv, batch});
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        const float other_max = __shfl_xor_sync(0xffffffffu, max[j], step);
        merge(scores, max[j], sum[j], other_max, __shfl_xor_sync(0xffffffffu, sum[j], step));
      }
    }
    Product::for_each_other_warp(max, sum, [&](int j, float other_max, float other_sum) {
      merge(scores, max[j], sum[j], other_max, other_sum);
    });
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      sink[j] = p.sink.ptr == nullptr ? -INFINITY : scores.exponent_of(*p.sink.of(head, 0), max[j]);
      top[j] = scores.sign() * max[j];
    }
  }

  static __device__ float finite(float m) { return m == -INFINITY ? 0.f : m; }
  static __device__ void add(const Scores& scores, float& max, float& sum, float new_max, float s0, float s1) {
    merge(scores, max, sum, new_max, 0.f);
    sum += exp2_approx(scores.exponent(s0, finite(max))) + exp2_approx(scores.exponent(s1, finite(max)));
  }
  // Sums relative to two maxima become one relative to the larger.
  static __device__ void merge(const Scores& scores, float& max, float& sum, float other_max, float other_sum) {
    const float both = finite(fmaxf(max, other_max));
    sum = sum * exp2_approx(scores.exponent(max, both)) + other_sum * exp2_approx(scores.exponent(other_max, both));
    max = fmaxf(max, other_max);
  }
};

}  // namespace flashsdk::cuda
