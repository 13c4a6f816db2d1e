// S = Q·K^T and P·V of a few queries of one head on tile registers (cpu/tiles.h), bf16. Rows of K are operand A as they
// lie in memory. Pairs of rows of V become operand B by two instructions a vector. 16 queries take as long as one:
// up to four are faster on vectors.
#pragma once

#include "cpu/few_softmax.h"
#include "cpu/pack.h"

#if defined(__AMX_BF16__)

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <int kHeadDim>
class FewQueriesOnTiles : public FewSoftmax<Bf16, kHeadDim, Traits<Bf16, kHeadDim>::kFewQueries> {
  using Base = FewSoftmax<Bf16, kHeadDim, Traits<Bf16, kHeadDim>::kFewQueries>;
  using Base::ahead_;
  using Base::d_;
  using Base::d_v_;
  using Base::kBlock;
  using Base::keys_;
  using Base::kKeys;
  using Base::out_;
  using Base::queries_;
  using Base::s_;
  static constexpr int kStepColumns = 2 * kTileWords;               // of K, in a row of a tile
  static constexpr int kPadded = round_up(kHeadDim, kStepColumns);  // columns
  static constexpr int kPairPitch = kHeadDim + Base::Tr::kPadding;  // words
  static_assert(Base::kMost == kTileRows && kBlock == 2 * kTileRows);

 public:
  using Base::row;
  using typename Base::Rows;

  template <class Scratch>
  explicit FewQueriesOnTiles(Scratch& scratch)
      : Base(scratch.s), copied_(reinterpret_cast<std::uint16_t*>(scratch.k)), pairs_(scratch.v) {
    static_assert(sizeof(float) * Base::kScoreFloats <= sizeof scratch.s);
    static_assert(sizeof(std::uint16_t) * kBlock * kPadded <= sizeof scratch.k);
    static_assert(sizeof(std::uint32_t) * kTileRows * kPairPitch <= sizeof scratch.v);
  }

  // Q is multiplied by q_factor, and `factor` takes a score to units of log2.
  void begin(const Bf16* q, std::int64_t stride, int queries, int d, int d_v, float q_factor, float factor) {
    Base::begin(queries, d, d_v, factor);
    std::memset(q_, 0, sizeof(std::uint32_t) * round_up(d, kStepColumns) / 2 * kTileRows);
    for (int l = 0; l < queries; ++l)
      for (int c = 0; c < d; ++c) q_[c / 2 * kTileRows + l] |= std::uint32_t{q[l * stride + c].bits} << c % 2 * 16;
    scale_operand(q_, q_factor, round_up(d, kStepColumns) / 2 * kTileRows);
  }

  // S of up to kKeys keys; `next` are the rows that are read after them.
  template <class E>
  __attribute__((noinline)) void scores(const Rows& k, const Rows& next) {
    keys_ = k.count();
    alignas(64) float s[kBlock * kTileRows];  // S^T (keys, queries)
    for (int block = 0; block < k.blocks(); ++block) {
      const KeyRange keys = k.block(block);
      const int steps = ceil_div(d_, kStepColumns);
      k.ask_ahead(next, block, steps, ahead_);
      const bool both = keys.end - keys.begin > kTileRows;
      const Operand first = operand<E>(k, keys.begin, keys.end, copied_);
      const Operand second =
          both ? operand<E>(k, keys.begin + kTileRows, keys.end, copied_ + kTileRows * kPadded) : first;
      asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
      _tile_zero(0);
      _tile_zero(1);
      for (int n = 0; n < steps; ++n) {
        _tile_loadd(2, first.row + n * kStepColumns, first.stride);
        _tile_loadd(4, q_ + n * kTileWords * kTileRows, kTileRows * 4);
        _tile_dpbf16ps(0, 2, 4);
        if (both) {
          _tile_loadd(3, second.row + n * kStepColumns, second.stride);
          _tile_dpbf16ps(1, 3, 4);
        }
        ahead_.step();
      }
      _tile_stored(0, s, kTileRows * 4);
      _tile_stored(1, s + kTileRows * kTileRows, kTileRows * 4);
      transpose(s, kTileRows, s_ + keys.begin, kKeys);
      transpose(s + kTileRows * kTileRows, kTileRows, s_ + keys.begin + kTileRows, kKeys);
    }
  }

  // O += P·V; `next` are the rows that are read after V's.
  template <class E>
  __attribute__((noinline)) void accumulate(const Rows& v, const Rows& next) {
    alignas(64) std::uint32_t p[kTileRows * kTileWords] = {};  // (queries, keys in pairs)
    for (int block = 0; block < v.blocks(); ++block) {
      const KeyRange keys = v.block(block);
      v.ask_ahead(next, block, kTileRows, ahead_);
      for (int l = 0; l < queries_; ++l) {
        const float* weights = row(l) + keys.begin;
        const bool both = keys.end - keys.begin > kLanes;
        store_pairs(p + l * kTileWords, to_bf16(load(weights), both ? load(weights + kLanes) : zero()));
      }
      for (int pair = 0; pair < kTileRows; ++pair) {
        const int r = keys.begin + 2 * pair;
        interleave<E>(r < keys.end ? v.template at<E>(r) : nullptr,
                      r + 1 < keys.end ? v.template at<E>(r + 1) : nullptr, pairs_ + pair * kPairPitch);
        ahead_.step();
      }
      asm volatile("" ::: "memory");
      _tile_loadd(7, p, kTileWords * 4);
      int c = 0;
      for (; c + 3 * kLanes < d_v_; c += 4 * kLanes) add_four(c);
      for (; c < d_v_; c += kLanes) add_one(c);
    }
  }

 private:
  // 16 rows as operand A, and the stride in bytes.
  struct Operand {
    const std::uint16_t* row;
    std::int64_t stride;
  };
  // Rows from r on: as they lie where they are whole steps and a stride apart, else a copy. What is behind `end` or
  // behind a row is not read: rows repeat the last, whose scores nobody takes, columns are zeros.
  template <class E>
  Operand operand(const Rows& k, int r, int end, std::uint16_t* copy) const {
    if constexpr (std::is_same_v<E, Bf16>) {
      const auto place = [&](int n) { return reinterpret_cast<const char*>(k.template at<E>(r + n)); };
      if (d_ % kStepColumns == 0 && r + kTileRows <= end) {
        const std::int64_t stride = place(1) - place(0);
        bool even = true;
        for (int n = 2; n < kTileRows; ++n) even &= place(n) - place(n - 1) == stride;
        if (even) return {reinterpret_cast<const std::uint16_t*>(place(0)), stride};
      }
    }
    const int padded = round_up(d_, kStepColumns);
    for (int n = 0; n < kTileRows; ++n) {
      const E* from = k.template at<E>(min_of(r + n, end - 1));
      std::uint16_t* to = copy + n * kPadded;
      if constexpr (std::is_same_v<E, Bf16>) {
        std::memcpy(to, from, sizeof(E) * d_);
      } else {
        widen_row(from, d_, reinterpret_cast<Bf16*>(to));
      }
      std::memset(to + d_, 0, sizeof(*to) * (padded - d_));
    }
    return {copy, kPadded * std::int64_t{sizeof(std::uint16_t)}};
  }

  // Columns of two rows, the first in the lower halves of words; zeros for what is null.
  template <class E>
  FLASHSDK_HD void interleave(const E* a, const E* b, std::uint32_t* dst) const {
    int c = 0;
    if constexpr (std::is_same_v<E, Bf16>)
      if (a != nullptr && b != nullptr)
        for (; c + kLanes <= d_v_; c += kLanes) interleave_rows(&a->bits + c, &b->bits + c, dst + c);
    alignas(64) std::uint16_t x[2][kLanes];
    for (; c < d_v_; c += kLanes) {
      load_bits(a, c, x[0]);
      load_bits(b, c, x[1]);
      interleave_rows(x[0], x[1], dst + c);
    }
  }
  // kLanes columns as bf16, zeros behind the row.
  template <class E>
  FLASHSDK_HD void load_bits(const E* from, int c, std::uint16_t* to) const {
    const int count = from == nullptr ? 0 : min_of(kLanes, d_v_ - c);
    if constexpr (std::is_same_v<E, Bf16>) {
      if (count > 0) std::memcpy(to, from + c, sizeof(E) * count);
    } else {
      if (count > 0) widen_row(from + c, count, reinterpret_cast<Bf16*>(to));
    }
    std::memset(to + count, 0, sizeof(*to) * (kLanes - count));
  }

  // Of 16 queries, in 64 or 16 columns.
  FLASHSDK_HD void add_four(int c) {
    constexpr int kOutBytes = kHeadDim * 4, kPairBytes = kPairPitch * 4;
    float* out = out_ + c;
    const std::uint32_t* v = pairs_ + c;
    _tile_loadd(0, out, kOutBytes);
    _tile_loadd(1, out + kLanes, kOutBytes);
    _tile_loadd(2, out + 2 * kLanes, kOutBytes);
    _tile_loadd(3, out + 3 * kLanes, kOutBytes);
    _tile_loadd(4, v, kPairBytes);
    _tile_dpbf16ps(0, 7, 4);
    _tile_loadd(5, v + kLanes, kPairBytes);
    _tile_dpbf16ps(1, 7, 5);
    _tile_loadd(4, v + 2 * kLanes, kPairBytes);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(5, v + 3 * kLanes, kPairBytes);
    _tile_dpbf16ps(3, 7, 5);
    _tile_stored(0, out, kOutBytes);
    _tile_stored(1, out + kLanes, kOutBytes);
    _tile_stored(2, out + 2 * kLanes, kOutBytes);
    _tile_stored(3, out + 3 * kLanes, kOutBytes);
  }
  FLASHSDK_HD void add_one(int c) {
    _tile_loadd(0, out_ + c, kHeadDim * 4);
    _tile_loadd(4, pairs_ + c, kPairPitch * 4);
    _tile_dpbf16ps(0, 7, 4);
    _tile_stored(0, out_ + c, kHeadDim * 4);
  }

  std::uint16_t* copied_;                                 // rows of K (kBlock, kPadded)
  std::uint32_t* pairs_;                                  // V (16, kPairPitch), rows in pairs
  alignas(64) std::uint32_t q_[kPadded / 2 * kTileRows];  // Q^T (head_dim in pairs, queries)
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS

#endif
