// The tile shapes of the CPU kernels and the element types they compute with: the one place that says them.
#pragma once

#include "common/mask_policy.h"
#include "cpu/pack.h"
#include "cpu/tiles.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

#if defined(__AMX_BF16__)
template <class T>
using DotFor = std::conditional_t<std::is_same_v<T, Bf16>, DotAmx,
                                  std::conditional_t<std::is_same_v<T, Fp16>, DotAmxSplit, DotF32>>;
#elif defined(__AVX512BF16__) || defined(FLASHSDK_NEON_BF16)
template <class T>
using DotFor = std::conditional_t<std::is_same_v<T, Bf16>, DotBf16, DotF32>;
#else
template <class T>
using DotFor = DotF32;
#endif

// Queries in one micro-kernel panel, one to a vector lane.
inline constexpr int kPanel = kVecs * kLanes;
inline constexpr double kLog2e = 1.4426950408889634;

// Of fp32 at most so many head dimensions are summed in one chain, and longer sums are cut and added: errors stay what
// they are at 256. Rounding to 16 bits hides those of any length.
template <class T>
inline constexpr int kLongestSum = sizeof(T) == 4 ? 256 : 1 << 30;

template <class T, int kHeadDim_>
struct Traits {
  using Element = T;
  using Dot = DotFor<T>;
  using ScoreDot = typename Dot::Exact;  // of S = Q·K^T and dP = dO·V^T
  using Word = typename Dot::Word;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim and head_dim_v are at most this
  static_assert(kHeadDim % 64 == 0, "packed rows hold whole panels of every instruction set");

  // Row pitches of packed tiles in words: of rows of head_dim values, kStep to a word and one part behind the other,
  // and of one part of rows of head_dim words. All are an odd number of cache lines, of 64-bit words one is twice that:
  // a power of two would put a column of rows into a few sets of L1.
  static constexpr int kPadding = 16, kParts = Dot::kParts;
  static constexpr int kRowPart = kHeadDim / Dot::kStep, kRowPitch = kParts * kRowPart + 4 * kPadding / sizeof(Word);
  static constexpr int kWidePitch = kHeadDim + kPadding;
  // Words of one part of a panel of queries, transposed.
  static constexpr int kTransposedPart = kRowPart * kPanel;

  // K and V tiles of 192 x 128 floats fill 192 KiB of L2 next to the panels; processors with AVX2 alone have less of
  // it, and wider heads take fewer keys. 96 to 384 are within a few points of each other. Products on tile registers
  // are so fast that what a job loads and packs shows, and processors that have them have 2 MiB of L2: 256 keys in the
  // backward gained a tenth, and at head_dim 256 128 instead of 96; more leave cores without jobs.
  static constexpr int kKeys = kHeadDim > 128 ? 96 : (kLanes == 16 ? 192 : 144);
  static constexpr int kBackwardKeys = Dot::kTiles ? (kHeadDim > 128 ? 128 : 256) : kKeys;
  // Queries that share a packed K and V tile in the forward. Packing reads rows that are pages apart: at head_dim 64
  // and 128 queries it costs 15 % of the products. Their operands and accumulators take 256 KiB of L2; beside tile
  // registers 0.75 to 1 MiB, which is 5 to 9 % faster than half of it.
  static constexpr int kForwardQueries =
      Dot::kTiles ? (kHeadDim > 256 ? 256 : (kHeadDim > 128 ? 512 : 1024)) : (kHeadDim > 128 ? 128 : 256);
  // So few read K and V where they lie (cpu/forward_few.h): with more, packed tiles are as fast. Of bf16 more than
  // kFewOnVectors take tile registers, where a processor has them.
  static constexpr int kFewQueries = min_of(kPanel, sizeof(T) == 4 ? 8 : 16);
  static constexpr int kFewOnVectors = Dot::kTiles && kParts == 1 ? 4 : kFewQueries;
  static_assert(kFewQueries <= 16, "the fewest queries of a job, so that a few are never cut");
  // Queries of a backward tile; dK and dV accumulators are loaded and stored once in so many steps. On tile registers,
  // whose products are short beside that, twice as many gained 7 %; in two parts they would not fit into L2.
  static constexpr int kBackwardQueries = Dot::kTiles && kParts == 1 ? 2 * kPanel : 64;
  static_assert(kForwardQueries % kPanel == 0 && kBackwardQueries % kPanel == 0);

  // V and K where a product sums over keys: pairs of rows as operand A by columns, or their transpose (head_dim, keys
  // in pairs) where A is read by rows. Words from one row of A to the next, and from one step to the next.
  static constexpr int pair_pitch(int keys) { return round_up(keys / Dot::kStep, 2 * kPadding) + kPadding; }
  template <int kRows>
  struct SummedKeys {
    static constexpr int kPart = pair_pitch(kRows);
    static constexpr int kRow = Dot::kTiles ? kParts * kPart : 1, kStep = Dot::kTiles ? 1 : kWidePitch;
    static constexpr int kWords = Dot::kTiles ? kHeadDim * kRow : (kRows + 1) / Dot::kStep * kWidePitch;
  };
  // Visible keys of a tile begin at a multiple of this: whole words, and whole steps of tile registers.
  static constexpr int kCut = Dot::kTiles ? 2 * Dot::kDepth : max_of(2, Dot::kStep);

  // P is rounded to the element type or stays fp32: enough digits for it (cpu/simd.h, exp2).
  static constexpr int kExpDegree = sizeof(T) == 4 ? 5 : (std::is_same_v<T, Bf16> ? 3 : 4);
  // Row padding of packed tiles: whole panels, so that columns beyond head_dim are zeros wherever they are read.
  static constexpr int padded(int d) { return round_up(d, kPanel < 64 ? kPanel : 64); }
};

// C = A·B over d head dimensions (kLongestSum).
template <class Tr, class S, int kUsed>
FLASHSDK_HD void product_of_heads(const typename Tr::Word* a, const typename Tr::Word* b, int d, float* c, int rows,
                                  Vec* maximum, RowPrefetch* prefetch) {
  using Dot = typename Tr::ScoreDot;
  constexpr int kPart = kLongestSum<typename Tr::Element>;
  const auto steps = [](int dims) { return ceil_div(dims, Tr::Dot::kStep); };
  if constexpr (Tr::kHeadDim > kPart) {
    if (d > kPart) {
      product<Dot, S, kUsed>(a, b, steps(kPart), c, rows, FromZero{}, nullptr, prefetch);
      for (int from = kPart; from < d; from += kPart)
        product<Dot, S, kUsed>(a + steps(from) * S::kAStep, b + steps(from) * S::kBStep, steps(min_of(kPart, d - from)),
                               c, rows, FromC{}, from + kPart < d ? nullptr : maximum);
      return;
    }
  }
  product<Dot, S, kUsed>(a, b, steps(d), c, rows, FromZero{}, maximum, prefetch);
}

// The largest multiple of 16 up to `limit` that divides a layout's block, so that a tile lies in one block.
FLASHSDK_HD constexpr int tile_in_block(int block, int limit) {
  int tile = limit - limit % 16;
  while (block % tile != 0) tile -= 16;
  return tile;
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
