// S = Q·K^T and P·V of a few queries of one head, as in decoding, with K and V read where they lie: packing a row costs
// more than all that is computed with it. Vector lanes are keys in S of fp32, head dimensions in P·V and, with 16 bits,
// in S.
#pragma once

#include "cpu/few_softmax.h"
#include "cpu/pack.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class T, int kHeadDim>
class FewQueries : public FewSoftmax<T, kHeadDim, Traits<T, kHeadDim>::kFewOnVectors> {
  using Base = FewSoftmax<T, kHeadDim, Traits<T, kHeadDim>::kFewOnVectors>;
  using Tr = typename Base::Tr;
  using Base::ahead_;
  using Base::d_;
  using Base::d_v_;
  using Base::kBlock;
  using Base::keys_;
  using Base::kKeys;
  using Base::out_;
  using Base::queries_;
  using Base::s_;
  static constexpr int kRowPitch = kHeadDim + Tr::kPadding;
  static constexpr int kWide = 4 * kLanes;  // columns

 public:
  using Base::kMost;
  using Base::row;
  using typename Base::Rows;

  template <class Scratch>
  explicit FewQueries(Scratch& scratch) : Base(scratch.s) {
    static_assert(sizeof(float) * Base::kScoreFloats <= sizeof scratch.s);
  }

  // Q is multiplied by q_factor, and `factor` takes a score to units of log2.
  void begin(const T* q, std::int64_t stride, int queries, int d, int d_v, float q_factor, float factor) {
    Base::begin(queries, d, d_v, factor);
    padded_d_ = round_up(d, kLanes);
    for (int l = 0; l < queries; ++l) {
      load_row(q + l * stride, d, padded_d_, q_ + l * kHeadDim);
      scale_operand(q_ + l * kHeadDim, q_factor, d);
    }
  }

  // S of up to kKeys keys; `next` are the rows that are read after them.
  template <class E>
  __attribute__((noinline)) void scores(const Rows& k, const Rows& next) {
    keys_ = k.count();
    for (int block = 0; block < k.blocks(); ++block) {
      const KeyRange keys = k.block(block);
      if constexpr (sizeof(T) == 2) {
        int steps = 0;
        by_groups([&]<int kQueries>(int) { steps += ceil_div(keys.end - keys.begin, kLanes / kQueries); });
        k.ask_ahead(next, block, steps, ahead_);
        by_groups([&]<int kQueries>(int l) { dot_rows<kQueries, E>(k, l, keys); });
      } else {
        k.ask_ahead(next, block, ceil_div(d_, kLanes), ahead_);
        score_keys(k, keys, s_ + keys.begin);
      }
    }
  }
  // O += P·V; `next` are the rows that are read after V's.
  template <class E>
  __attribute__((noinline)) void accumulate(const Rows& v, const Rows& next) {
    for (int block = 0; block < v.blocks(); ++block) {
      const KeyRange keys = v.block(block);
      int groups = 0;
      by_groups([&]<int kQueries>(int) { groups += d_v_ / kWide + d_v_ % kWide / kLanes; });
      v.ask_ahead(next, block, max_of(1, groups * ((keys.end - keys.begin) / 2)), ahead_);
      by_groups([&]<int kQueries>(int l) { add_rows<kQueries, E>(v, l, keys); });
    }
  }

 private:
  // Calls f<n>(first query) for groups of n queries, for which a row is loaded and converted once. Of more than four,
  // 32 registers would not hold the sums.
  template <class F>
  FLASHSDK_HD void by_groups(F f) {
    int l = 0;
    for (; l + 4 <= queries_; l += 4) f.template operator()<4>(l);
    for (; l + 2 <= queries_; l += 2) f.template operator()<2>(l);
    if (l < queries_) f.template operator()<1>(l);
  }

  // Scores of up to kBlock keys, each summed in the order of cpu/microkernel.h: the backward of fp32 computes them anew
  // there, and its P would take over what an lse of other sums differs by. A block has two chains of sums, whose
  // latency shows otherwise.
  void score_keys(const Rows& k, KeyRange keys, float* s) {
    // Whole rows first: at a stride of a page their columns would push each other out of L1.
    alignas(64) float rows[kBlock * kRowPitch], columns[kLanes * kBlock];
    for (int r = 0; r < kBlock; ++r)
      load_row(k.template at<T>(min_of(keys.begin + r, keys.end - 1)), d_, padded_d_, rows + r * kRowPitch);
    Vec sum[kMost][2];
    for (int l = 0; l < queries_; ++l) sum[l][0] = sum[l][1] = zero();
    for (int c = 0; c < d_; c += kLanes) {
      if constexpr (kHeadDim > kLongestSum<T>)
        if (c > 0 && c % kLongestSum<T> == 0) next_sum(sum, s, c > kLongestSum<T>);
      transpose(rows + c, kRowPitch, columns, kBlock);
      transpose(rows + kLanes * kRowPitch + c, kRowPitch, columns + kLanes, kBlock);
      by_groups([&]<int kQueries>(int l) {
        add_products<kQueries>(q_ + l * kHeadDim + c, columns, min_of(kLanes, d_ - c), sum + l);
      });
      ahead_.step();
    }
    next_sum(sum, s, kHeadDim > kLongestSum<T> && d_ > kLongestSum<T>);
  }
  template <int kQueries>
  static FLASHSDK_HD void add_products(const float* q, const float* columns, int count, Vec (*sum)[2]) {
    Vec s[kQueries][2];
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) s[i][0] = sum[i][0], s[i][1] = sum[i][1];
    for (int n = 0; n < count; ++n) {
      const Vec x = load(columns + n * kBlock), y = load(columns + n * kBlock + kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const Vec factor = set1(q[i * kHeadDim + n]);
        s[i][0] = fma(factor, x, s[i][0]);
        s[i][1] = fma(factor, y, s[i][1]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) sum[i][0] = s[i][0], sum[i][1] = s[i][1];
  }
  // Sums so far into s, or added to what is there, and new ones.
  FLASHSDK_HD void next_sum(Vec (&sum)[kMost][2], float* s, bool added) const {
    for (int l = 0; l < queries_; ++l)
      for (int n = 0; n < 2; ++n) {
        float* at = s + l * kKeys + n * kLanes;
        store(at, added ? add(sum[l][n], load(at)) : sum[l][n]);
        sum[l][n] = zero();
      }
  }

  // Scores of the kQueries queries from l on, with head dimensions in vector lanes: K is not transposed. Sums are in
  // another order than in cpu/microkernel.h, which 16-bit results do not show.
  template <int kQueries, class E>
  FLASHSDK_HD void dot_rows(const Rows& k, int l, KeyRange range) {
    constexpr int kRows = kLanes / kQueries;  // at a time: as many sums as lanes
    alignas(64) float last[kLanes];
    const float* q = q_ + l * kHeadDim;
    for (int first = range.begin; first < range.end; first += kRows) {
      const E* keys[kRows];
      Vec sum[kLanes];  // (kQueries, kRows)
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) keys[r] = k.template at<E>(min_of(first + r, range.end - 1));
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sum[i] = zero();
      int c = 0;
      for (; c + kLanes <= d_; c += kLanes)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec x = load_as_float(keys[r] + c);
#pragma GCC unroll 4
          for (int n = 0; n < kQueries; ++n)
            sum[n * kRows + r] = fma(load(q + n * kHeadDim + c), x, sum[n * kRows + r]);
        }
      if (c < d_)
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          load_row(keys[r] + c, d_ - c, kLanes, last);
#pragma GCC unroll 4
          for (int n = 0; n < kQueries; ++n)
            sum[n * kRows + r] = fma(load(q + n * kHeadDim + c), load(last), sum[n * kRows + r]);
        }
      store(last, sum_of_each(sum));
#pragma GCC unroll 4
      for (int n = 0; n < kQueries; ++n) std::memcpy(row(l + n) + first, last + n * kRows, sizeof(float) * kRows);
      ahead_.step();
    }
  }

  // O += P·V of the kQueries queries from l on and a block of keys.
  template <int kQueries, class E>
  void add_rows(const Rows& v, int l, KeyRange keys) {
    int c = 0;
    for (; c + kWide <= d_v_; c += kWide) add_columns<kQueries, kWide / kLanes, E>(v, l, keys, c);
    for (; c + kLanes <= d_v_; c += kLanes) add_columns<kQueries, 1, E>(v, l, keys, c);
    if (c < d_v_) add_last_columns<kQueries, E>(v, l, keys, c);
  }

  // kN vectors of columns. The sum over keys is taken first; that of one query in two chains, of even and of odd keys,
  // which hide more of their latency.
  template <int kQueries, int kN, class E>
  FLASHSDK_HD void add_columns(const Rows& v, int l, KeyRange keys, int column) {
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
        const Vec x = load_as_float(v.template at<E>(r) + column + n * kLanes);
        if constexpr (kQueries == 1) {
          sum[chain][n] = fma(set1(p[0][r]), x, sum[chain][n]);
        } else {
#pragma GCC unroll 4
          for (int i = 0; i < kQueries; ++i) sum[i][n] = fma(set1(p[i][r]), x, sum[i][n]);
        }
      }
    };
    int r = keys.begin;
    for (; r + 2 <= keys.end; r += 2) {
      add_key(r, 0);
      add_key(r + 1, 1);
      ahead_.step();
    }
    if (r < keys.end) add_key(r, 0);
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

  // Fewer than a vector of columns.
  template <int kQueries, class E>
  void add_last_columns(const Rows& v, int l, KeyRange keys, int column) {
    alignas(64) float x[kLanes];
    Vec sum[kQueries];
    for (int n = 0; n < kQueries; ++n) sum[n] = zero();
    for (int r = keys.begin; r < keys.end; ++r) {
      load_row(v.template at<E>(r) + column, d_v_ - column, kLanes, x);
      for (int n = 0; n < kQueries; ++n) sum[n] = fma(set1(row(l + n)[r]), load(x), sum[n]);
    }
    for (int n = 0; n < kQueries; ++n) {
      float* out = out_ + (l + n) * kHeadDim + column;
      store(out, add(load(out), sum[n]));
    }
  }

  int padded_d_ = 0;
  alignas(64) float q_[kMost * kHeadDim];
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
