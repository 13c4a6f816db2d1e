// The register-blocked product that everything is made of: kRows x kVecs accumulators, one broadcast operand A, one
// vector operand B,
//   C[r][lane] (+)= sum over steps s of A(r, s) · B(s, lane).
//
// Vector lanes are queries for S^T = K·Q^T, O^T = V^T·P^T and dQ^T = K^T·dS^T, so the softmax is vertical, and head
// dimensions for dV = P^T·dO and dK = dS^T·Q. Strides are compile-time constants: they become displacements.
#pragma once

#include <type_traits>

#include "cpu/simd.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// Rows are computed six at a time, which saturates the multipliers, and the rest four at a time; buffers have
// padded_rows(n) rows. Rows n and above come out as whatever their (finite) inputs make of them.
FLASHSDK_HD constexpr int rows_by_four(int rows) {
  int even = round_up(rows, 2);
  return even % 6 == 0 ? 0 : (even % 6 == 4 || even < 6 ? 1 : 2);
}
FLASHSDK_HD constexpr int padded_rows(int rows) {
  int fours = rows_by_four(rows), rest = max_of(0, round_up(rows, 2) - 4 * fours);
  return rest + 4 * fours;
}

// How a product consumes its operands. A word of A or B holds kStep neighbouring values of the summed index, and words
// are consumed kDepth at a time. A value is the sum of kParts words, and Exact is the product that leaves out none of
// theirs. Tile registers (cpu/tiles.h) read A by rows only.
struct DotOnVectors {
  static constexpr bool kTiles = false, kBlocks = false;
  static constexpr int kParts = 1, kDepth = 1, kMaxRowPadding = 3;
  static FLASHSDK_HD constexpr int padded_rows(int rows) { return FLASHSDK_ISA_NS::padded_rows(rows); }
};
struct DotF32 : DotOnVectors {
  using Exact = DotF32;
  using Word = float;
  using Operand = Vec;
  static constexpr int kStep = 1;
  static FLASHSDK_HD Operand load_operand(const Word* p) { return load(p); }
  static FLASHSDK_HD Operand broadcast(Word x) { return set1(x); }
  static FLASHSDK_HD Vec accumulate(Vec acc, Operand a, Operand b) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct DotBf16 : DotOnVectors {
  using Exact = DotBf16;
  using Word = std::uint32_t;
  using Operand = __m512i;
  static constexpr int kStep = 2;
  static FLASHSDK_HD Operand load_operand(const Word* p) { return load_pairs(p); }
  static FLASHSDK_HD Operand broadcast(Word x) { return set1_pairs(x); }
  static FLASHSDK_HD Vec accumulate(Vec acc, Operand a, Operand b) { return dot_pairs(acc, b, a); }
};
#elif defined(FLASHSDK_NEON_BF16)
struct DotBf16 : DotOnVectors {
  using Exact = DotBf16;
  using Word = std::uint64_t;
  static constexpr bool kBlocks = true;  // an instruction takes two rows and two lanes
  static constexpr int kStep = 4;
};
#endif

// Strides in words (A, B) and floats (C) of the row, the step and the row of C; and, where values have two parts, from
// the first to the second.
template <int kARow_, int kAStep_, int kBStep_, int kCRow_, int kAPart_ = 0, int kBPart_ = 0>
struct Strides {
  static constexpr int kARow = kARow_, kAStep = kAStep_, kBStep = kBStep_, kCRow = kCRow_;
  static constexpr int kAPart = kAPart_, kBPart = kBPart_;
};

struct FromZero {
  template <int kCRow>
  FLASHSDK_HD Vec operator()(const float*, int, int) const {
    return zero();
  }
};
struct FromC {
  template <int kCRow>
  FLASHSDK_HD Vec operator()(const float* c, int r, int v) const {
    return load(c + r * kCRow + v * kLanes);
  }
};
struct FromScaledC {  // the online softmax's rescale, folded into the load
  const Vec* scale;
  template <int kCRow>
  FLASHSDK_HD Vec operator()(const float* c, int r, int v) const {
    return mul(load(c + r * kCRow + v * kLanes), scale[v]);
  }
};

#if defined(FLASHSDK_NEON_BF16)
// acc = the sum of the steps, by blocks of two rows and two lanes. Operands B come one after the other: beside 24
// accumulators and three operands A all of them would not fit 32 registers.
template <class Dot, class S, int kRows, int kUsed>
FLASHSDK_HD void sum_blocks(const typename Dot::Word* a, const typename Dot::Word* b, int steps,
                            Vec (&acc)[kRows][kUsed]) {
  constexpr int kRowPairs = kRows / 2, kLanePairs = 2 * kUsed;
  Vec block[kRowPairs][kLanePairs];
#pragma GCC unroll 16
  for (int r = 0; r < kRowPairs; ++r)
#pragma GCC unroll 16
    for (int l = 0; l < kLanePairs; ++l) block[r][l] = zero();

// Of two steps at once Clang 19 would load operands so early that accumulators end on the stack.
#pragma GCC unroll 1
  for (int s = 0; s < steps; ++s) {
    bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 16
    for (int r = 0; r < kRowPairs; ++r) {
      const std::uint64_t* at = a + 2 * r * S::kARow;
      rows[r] = S::kARow == 1 ? load_words(at) : load_words(at, at + S::kARow);
    }
#pragma GCC unroll 16
    for (int l = 0; l < kLanePairs; ++l) {
      const bfloat16x8_t lanes = load_words(b + 2 * l);
#pragma GCC unroll 16
      for (int r = 0; r < kRowPairs; ++r) block[r][l] = multiply_blocks(block[r][l], rows[r], lanes);
    }
    a += S::kAStep;
    b += S::kBStep;
  }

#pragma GCC unroll 16
  for (int r = 0; r < kRowPairs; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kUsed; ++v) {
      acc[2 * r][v] = row_of_blocks<0>(block[r][2 * v], block[r][2 * v + 1]);
      acc[2 * r + 1][v] = row_of_blocks<1>(block[r][2 * v], block[r][2 * v + 1]);
    }
}
#endif

// The sum of the steps is taken first, and C added to it: what reaches a long running sum is rounded once a product and
// not once a step, which keeps fp32 four times as exact at 4096 rows. maximum, when not null, takes the running maximum
// of every lane of C.
template <class Dot, int kRows, class S, int kUsed, class Start>
__attribute__((noinline)) void micro_kernel(const typename Dot::Word* a, const typename Dot::Word* b, int steps,
                                            float* c, Start start, Vec* maximum) {
  Vec acc[kRows][kUsed];
  if constexpr (Dot::kBlocks) {
    sum_blocks<Dot, S>(a, b, steps, acc);
  } else {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < kUsed; ++v) acc[r][v] = zero();

    // Fewer counters and branches between the products: 8 to 10 % on an AVX2 core whose sibling thread is busy.
#pragma GCC unroll 4
    for (int s = 0; s < steps; ++s) {
      typename Dot::Operand lane[kUsed];
#pragma GCC unroll 16
      for (int v = 0; v < kUsed; ++v) {
        lane[v] = Dot::load_operand(b + v * kLanes);
        keep_in_register(lane[v]);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        typename Dot::Operand x = Dot::broadcast(a[r * S::kARow]);
#pragma GCC unroll 16
        for (int v = 0; v < kUsed; ++v) acc[r][v] = Dot::accumulate(acc[r][v], x, lane[v]);
      }
      a += S::kAStep;
      b += S::kBStep;
    }
  }

#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kUsed; ++v) {
      if constexpr (!std::is_same_v<Start, FromZero>)
        acc[r][v] = add(acc[r][v], start.template operator()<S::kCRow>(c, r, v));
      store(c + r * S::kCRow + v * kLanes, acc[r][v]);
    }
  if (maximum != nullptr) {
#pragma GCC unroll 16
    for (int v = 0; v < kUsed; ++v) {
      Vec m = maximum[v];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) m = max(m, acc[r][v]);
      maximum[v] = m;
    }
  }
}

inline constexpr int kRowsAhead = 6;  // prefetched per micro-kernel of six rows: a tile of keys per product over one

// Rows of a tensor that will be packed soon. Their pages are far apart when heads interleave, so what costs is the
// translation: hardware prefetchers stop at the page, these do not. Spread over the products that run meanwhile, the
// misses disappear behind them.
class RowPrefetch {
 public:
  RowPrefetch() = default;
  template <class T>
  RowPrefetch(const T* first, std::int64_t stride, int rows, int d)
      : row_(reinterpret_cast<const char*>(first)),
        stride_(stride * static_cast<std::int64_t>(sizeof(T))),
        rows_(rows),
        row_bytes_(d * static_cast<int>(sizeof(T))) {}

  // Asks for the next `count` rows.
  void advance(int count) {
    for (; count > 0 && rows_ > 0; --count, --rows_, row_ += stride_)
      for (int at = 0; at < row_bytes_; at += kCacheLine) __builtin_prefetch(row_ + at, 0, 2);
  }

 private:
  static constexpr int kCacheLine = 64;
  const char* row_ = nullptr;
  std::int64_t stride_ = 0;
  int rows_ = 0, row_bytes_ = 0;
};

// C rows [0, rows) (and padding) += or = A·B for one panel of kVecs·kLanes lanes, or its first kUsed vectors of them.
template <class Dot, class S, int kUsed = kVecs, class Start>
  requires(!Dot::kTiles)
void product(const typename Dot::Word* a, const typename Dot::Word* b, int steps, float* c, int rows, Start start,
             Vec* maximum = nullptr, RowPrefetch* prefetch = nullptr) {
  const int fours = rows_by_four(rows), end = padded_rows(rows);
  int r = 0;
  for (; r < end - 4 * fours; r += 6) {
    micro_kernel<Dot, 6, S, kUsed>(a + r * S::kARow, b, steps, c + r * S::kCRow, start, maximum);
    if (prefetch != nullptr) prefetch->advance(kRowsAhead);
  }
  for (; r < end; r += 4) micro_kernel<Dot, 4, S, kUsed>(a + r * S::kARow, b, steps, c + r * S::kCRow, start, maximum);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
