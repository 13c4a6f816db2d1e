// A few queries of one head, as in decoding, with K and V read where they lie: packing a row costs more than all that
// is computed with it. Keys are in vector lanes in the softmax and, in fp32, in S = Q·K^T; head dimensions in
// P·V and, with 16 bits, in S.
#pragma once

#include "cpu/pack.h"
#include "cpu/scores.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// All lanes in one value.
template <class F>
FLASHSDK_HD float fold_lanes(Vec x, F fold) {
  alignas(64) float lane[kLanes];
  store(lane, x);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] = fold(lane[i], lane[i + n]);
  return lane[0];
}

template <class T, int kHeadDim>
class FewQueries {
  using Tr = Traits<T, kHeadDim>;
  static constexpr int kMax = Tr::kFewQueries, kKeys = round_up(Tr::kKeys, 2 * kLanes);
  static constexpr int kRowPitch = kHeadDim + Tr::kPadding;

  // Rows of keys: a stride apart, or each in a page of its own.
  template <class E>
  struct StridedRows {
    const E* first;
    std::int64_t stride;
    FLASHSDK_HD const E* operator[](int r) const { return first + r * stride; }
  };
  template <class E>
  struct ListedRows {
    const E* row[kKeys];
    FLASHSDK_HD const E* operator[](int r) const { return row[r]; }
  };

 public:
  static bool fit(int queries) { return queries <= kMax; }

  // Calls f with the rows of at most kKeys keys.
  template <class E, class F>
  static void with_rows(const KeyRows<const E>& rows, KeyRange keys, F f) {
    const int count = keys.end - keys.begin;
    if (rows.run(keys.begin) >= count) return f(StridedRows<E>{rows.at(keys.begin), rows.stride()});
    ListedRows<E> listed;
    for (int r = 0; r < count;) {
      const E* row = rows.at(keys.begin + r);
      const int run_end = min_of(r + rows.run(keys.begin + r), count);
      for (; r < run_end; ++r, row += rows.stride()) listed.row[r] = row;
    }
    f(listed);
  }

  // Q is multiplied by q_factor, and `factor` takes a score to units of log2.
  FewQueries(const T* q, std::int64_t stride, int queries, int d, int d_v, float q_factor, float factor)
      : queries_(queries), d_(d), padded_d_(round_up(d, kLanes)), d_v_(d_v), factor_(factor) {
    for (int l = 0; l < queries; ++l) {
      load_row(q + l * stride, d, padded_d_, q_ + l * kHeadDim);
      scale_operand(q_ + l * kHeadDim, q_factor, d);
      std::memset(out_ + l * kHeadDim, 0, sizeof(float) * kHeadDim);
      max_[l] = -INFINITY;
      sum_[l] = 0.f;
    }
  }

  // S of up to kKeys keys.
  template <class Rows>
  __attribute__((noinline)) void scores(const Rows& k, int keys) {
    keys_ = keys;
    if constexpr (sizeof(T) == 2) {
      int l = 0;
      for (; l + 4 <= queries_; l += 4) dot_rows<4>(k, l);
      for (; l + 2 <= queries_; l += 2) dot_rows<2>(k, l);
      if (l < queries_) dot_rows<1>(k, l);
    } else {
      for (int r = 0; r < keys; r += kBlock) score_keys(k, r, min_of(kBlock, keys - r), s_ + r);
    }
  }
  // Of a query, a row of keys.
  float* row(int query) { return s_ + query * kKeys; }

  // The online softmax's step: P in place of S, and O = O·exp(m - m').
  __attribute__((noinline)) void exponentiate() {
    for (int l = 0; l < queries_; ++l) {
      for (int r = keys_; r < round_up(keys_, kLanes); ++r) row(l)[r] = -INFINITY;
      raise_softmax(l);
    }
  }
  // O += P·V.
  template <class Rows>
  __attribute__((noinline)) void accumulate(const Rows& v) {
    int l = 0;
    if constexpr (kLanes == 16)  // as many sums as registers hold: each row is converted once
      for (; l + 4 <= queries_; l += 4) add_rows<4>(v, l);
    for (; l + 2 <= queries_; l += 2) add_rows<2>(v, l);
    if (l < queries_) add_rows<1>(v, l);
  }

  float* out(int query) { return out_ + query * kHeadDim; }  // not normalised
  float max(int query) const { return max_[query]; }
  float sum(int query) const { return sum_[query]; }

 private:
  // Scores of up to kBlock keys, each summed in the order of cpu/microkernel.h: the backward of fp32 computes them anew
  // there, and its P would take over what an lse of other sums differs by. A block has two chains of sums, whose
  // latency shows otherwise.
  static constexpr int kBlock = 2 * kLanes;
  template <class Rows>
  void score_keys(const Rows& k, int first, int keys, float* s) {
    alignas(64) float columns[kLanes * kBlock];
    // Whole rows first: where heads interleave each is in a page of its own, and prefetched as far as it is read.
    for (int r = 0; r < kBlock; ++r) load_row(k[first + min_of(r, keys - 1)], d_, padded_d_, rows_ + r * kRowPitch);
    Vec sum[kMax][2];
    for (int l = 0; l < queries_; ++l) sum[l][0] = sum[l][1] = zero();
    for (int c = 0; c < d_; c += kLanes) {
      if constexpr (kHeadDim > kLongestSum<T>)
        if (c > 0 && c % kLongestSum<T> == 0) next_sum(sum, s, c > kLongestSum<T>);
      transpose(rows_ + c, kRowPitch, columns, kBlock);
      transpose(rows_ + kLanes * kRowPitch + c, kRowPitch, columns + kLanes, kBlock);
      for (int l = 0; l < queries_; ++l)
        for (int n = 0; n < min_of(kLanes, d_ - c); ++n) {
          const Vec q = set1(q_[l * kHeadDim + c + n]);
          sum[l][0] = fma(q, load(columns + n * kBlock), sum[l][0]);
          sum[l][1] = fma(q, load(columns + n * kBlock + kLanes), sum[l][1]);
        }
    }
    next_sum(sum, s, kHeadDim > kLongestSum<T> && d_ > kLongestSum<T>);
  }
  // Sums so far into s, or added to what is there, and new ones.
  FLASHSDK_HD void next_sum(Vec (&sum)[kMax][2], float* s, bool added) const {
    for (int l = 0; l < queries_; ++l)
      for (int n = 0; n < 2; ++n) {
        float* at = s + l * kKeys + n * kLanes;
        store(at, added ? add(sum[l][n], load(at)) : sum[l][n]);
        sum[l][n] = zero();
      }
  }

  // Scores of the kQueries queries from l on, with head dimensions in vector lanes: K is not transposed. Sums are in
  // another order than in cpu/microkernel.h, which 16-bit results do not show.
  template <int kQueries, class Rows>
  FLASHSDK_HD void dot_rows(const Rows& k, int l) {
    constexpr int kRows = kLanes / kQueries;  // at a time: as many sums as lanes
    alignas(64) float sums[kLanes * kLanes], columns[kLanes * kLanes], last[kLanes];
    const float* q[kQueries];
    for (int n = 0; n < kQueries; ++n) q[n] = q_ + (l + n) * kHeadDim;
    for (int first = 0; first < keys_; first += kRows) {
      decltype(k[0]) keys[kRows], next[kRows];
      for (int r = 0; r < kRows; ++r) {
        keys[r] = k[min_of(first + r, keys_ - 1)];
        next[r] = k[min_of(first + kRows + r, keys_ - 1)];
      }
      Vec sum[kRows][kQueries];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < kQueries; ++n) sum[r][n] = zero();
      int c = 0;
      for (; c + kLanes <= d_; c += kLanes)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec x = load_as_float(keys[r] + c);
          __builtin_prefetch(next[r] + c, 0, 2);
#pragma GCC unroll 4
          for (int n = 0; n < kQueries; ++n) sum[r][n] = fma(load(q[n] + c), x, sum[r][n]);
        }
      if (c < d_)
        for (int r = 0; r < kRows; ++r) {
          load_row(keys[r] + c, d_ - c, kLanes, last);
          for (int n = 0; n < kQueries; ++n) sum[r][n] = fma(load(q[n] + c), load(last), sum[r][n]);
        }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < kQueries; ++n) store(sums + (n * kRows + r) * kLanes, sum[r][n]);
      transpose(sums, kLanes, columns, kLanes);
      Vec total = load(columns);
      for (int i = 1; i < kLanes; ++i) total = add(total, load(columns + i * kLanes));
      store(last, total);
      for (int n = 0; n < kQueries; ++n) std::memcpy(row(l + n) + first, last + n * kRows, sizeof(float) * kRows);
    }
  }

  void raise_softmax(int l) {
    float* s = row(l);
    const int end = round_up(keys_, kLanes);
    Vec top = load(s);
    for (int r = kLanes; r < end; r += kLanes) top = FLASHSDK_ISA_NS::max(top, load(s + r));
    const float old_max = max_[l], new_max = fold_lanes(top, [](float a, float b) { return a > b ? a : b; });
    if (new_max > old_max) max_[l] = new_max;
    // A row that has seen no key yet takes m' = 0 instead of -inf.
    const Vec shift = finite_or_zero(set1(max_[l])), factor = set1(factor_);
    Vec sum = zero();
    for (int r = 0; r < end; r += kLanes) {
      const Vec p = exp2<Tr::kExpDegree>(mul(sub(load(s + r), shift), factor));
      sum = add(sum, p);
      store(s + r, p);
    }
    const Vec rescale = exp2<5>(mul(sub(set1(old_max), shift), factor));
    alignas(64) float scale[kLanes];
    store(scale, rescale);
    sum_[l] = sum_[l] * scale[0] + fold_lanes(sum, [](float a, float b) { return a + b; });
    for (int c = 0; c < d_v_; c += kLanes) {
      float* out = out_ + l * kHeadDim + c;
      store(out, mul(load(out), rescale));
    }
  }

  // O += P·V of the kQueries queries from l on.
  template <int kQueries, class Rows>
  void add_rows(const Rows& v, int l) {
    constexpr int kWide = 4;
    int c = 0;
    for (; c + kWide * kLanes <= d_v_; c += kWide * kLanes) add_columns<kQueries, kWide>(v, l, c);
    for (; c + kLanes <= d_v_; c += kLanes) add_columns<kQueries, 1>(v, l, c);
    if (c < d_v_) add_last_columns<kQueries>(v, l, c);
  }

  // kN vectors of columns. The sum over keys is taken first; that of one query in two chains, of even and of odd keys,
  // which hide more of their latency.
  template <int kQueries, int kN, class Rows>
  FLASHSDK_HD void add_columns(const Rows& v, int l, int column) {
    constexpr int kSums = max_of(2, kQueries);
    const float* p[kSums];
    Vec sum[kSums][kN];
#pragma GCC unroll 4
    for (int i = 0; i < kSums; ++i) {
      p[i] = row(l + min_of(i, kQueries - 1));
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) sum[i][n] = zero();
    }
    auto add_key = [&](int r, int chain) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int n = 0; n < kN; ++n) {
        const Vec x = load_as_float(v[r] + column + n * kLanes);
        if constexpr (kQueries == 1) {
          sum[chain][n] = fma(set1(p[0][r]), x, sum[chain][n]);
        } else {
#pragma GCC unroll 4
          for (int i = 0; i < kQueries; ++i) sum[i][n] = fma(set1(p[i][r]), x, sum[i][n]);
        }
      }
    };
    // The first to come by asks for whole rows: they may be apart in memory, where processors do not guess them.
    constexpr int kAhead = 16;
    const bool asks = column == 0 && l == 0;
    int r = 0;
    for (; r + 2 <= keys_; r += 2) {
      if (asks && r + kAhead + 2 <= keys_) {
        prefetch_row(v[r + kAhead], d_v_);
        prefetch_row(v[r + kAhead + 1], d_v_);
      }
      add_key(r, 0);
      add_key(r + 1, 1);
    }
    if (r < keys_) add_key(r, 0);
#pragma GCC unroll 4
    for (int n = 0; n < kN; ++n) {
      float* out = out_ + l * kHeadDim + column + n * kLanes;
      if constexpr (kQueries == 1) {
        store(out, add(load(out), add(sum[0][n], sum[1][n])));
      } else {
#pragma GCC unroll 4
        for (int i = 0; i < kQueries; ++i, out += kHeadDim) store(out, add(load(out), sum[i][n]));
      }
    }
  }

  template <class E>
  static FLASHSDK_HD void prefetch_row(const E* row, int columns) {
    constexpr int kLine = 64 / sizeof(E);
    for (int c = 0; c < columns; c += kLine) __builtin_prefetch(row + c, 0, 2);
  }

  // Fewer than a vector of columns.
  template <int kQueries, class Rows>
  void add_last_columns(const Rows& v, int l, int column) {
    alignas(64) float x[kLanes];
    Vec sum[kQueries];
    for (int n = 0; n < kQueries; ++n) sum[n] = zero();
    for (int r = 0; r < keys_; ++r) {
      load_row(v[r] + column, d_v_ - column, kLanes, x);
      for (int n = 0; n < kQueries; ++n) sum[n] = fma(set1(row(l + n)[r]), load(x), sum[n]);
    }
    for (int n = 0; n < kQueries; ++n) {
      float* out = out_ + (l + n) * kHeadDim + column;
      store(out, add(load(out), sum[n]));
    }
  }

  int queries_, d_, padded_d_, d_v_, keys_ = 0;
  float factor_;  // of a score, to units of log2
  float max_[kMax], sum_[kMax];
  alignas(64) float q_[kMax * kHeadDim];
  alignas(64) float out_[kMax * kHeadDim];
  alignas(64) float rows_[2 * kLanes * kRowPitch];  // of K
  alignas(64) float s_[kMax * kKeys];               // S (queries, keys), then P
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
