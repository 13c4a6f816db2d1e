// AMX: the same product as microkernel.h on tile registers, 16 x 16 x 32 multiply-adds to an instruction.
//
// A tile register holds 16 rows of 64 bytes. Packed rows of bf16 are operand A as they lie, pairs of neighbouring steps
// by lanes are operand B, and C is fp32 as everywhere; so only the widths of reads change: whole tiles, that is steps
// in multiples of 16 words and rows in multiples of 16, which buffers are padded to with zeros. fp16 runs on the same
// registers in two parts.
#pragma once

#include "cpu/microkernel.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

#if defined(__AMX_BF16__)

inline constexpr int kTileRows = 16, kTileWords = 16;
inline constexpr int kRowsAheadOfBlock = 12;  // prefetched per block: a tile of keys over one of queries at head_dim 64

// Of values in two parts all four products of parts or, without that of both second ones, three.
template <int kParts_, bool kAllProducts_ = false>
struct DotTiles {
  using Word = std::uint32_t;
  using Exact = DotTiles<kParts_, kParts_ == 2>;
  static constexpr bool kTiles = true, kAllProducts = kAllProducts_;
  static constexpr int kParts = kParts_, kStep = 2, kDepth = kTileWords, kMaxRowPadding = kTileRows - 1;
  static FLASHSDK_HD constexpr int padded_rows(int rows) { return round_up(rows, kTileRows); }
};
using DotAmx = DotTiles<1>;
// Values in two parts: fp16 has 11 significant bits, bf16 has 8, and the sum of two bf16 is exactly one fp16. The
// product of both second parts is at most 2^-16 of the whole. It is computed where a difference would show it: of
// scores from their maximum, and of dP from delta, which is the same product where a query sees one key.
using DotAmxSplit = DotTiles<2>;
using DotAmxExact = DotAmxSplit::Exact;

// What LDTILECFG reads: palette 1, all eight registers full.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileShapes) == 64);
inline constexpr TileShapes kTileShapes;  // static: the intrinsic tells the compiler of its first bytes only

// Tile registers are usable between these two calls. They end in their initial state, which costs later context
// switches nothing and leaves the caller's own thread as the ABI has it. No class with a destructor: its clean-up for
// exceptions, which kernels do not throw, would bring in a symbol that all instruction sets share.
FLASHSDK_HD void take_tile_registers() { _tile_loadconfig(&kTileShapes); }
FLASHSDK_HD void release_tile_registers() { _tile_release(); }

// C (16·kRowTiles rows, 32 lanes) = or += A·B: up to four accumulators, which hide the latency of each other, and, of
// two rows of tiles, at most as many loads as products.
template <class Dot, class S, int kRowTiles, bool kFromZero>
__attribute__((noinline)) void tile_block(const std::uint32_t* a, const std::uint32_t* b, int words, float* c) {
  constexpr int kARow = S::kARow * 4, kBRow = S::kBStep * 4, kCRow = S::kCRow * 4;  // bytes
  float *c10 = c + kTileRows * S::kCRow, *c11 = c10 + kLanes;
  auto load_a = [&](const std::uint32_t* from) __attribute__((always_inline)) {
    _tile_loadd(4, from, kARow);
    if constexpr (kRowTiles == 2) _tile_loadd(5, from + kTileRows * S::kARow, kARow);
  };
  auto load_b = [&](const std::uint32_t* from) __attribute__((always_inline)) {
    _tile_loadd(6, from, kBRow);
    _tile_loadd(7, from + kLanes, kBRow);
  };
  auto multiply = [&]() __attribute__((always_inline)) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRowTiles == 2) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  };
  asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
  if constexpr (kFromZero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, kCRow);
    _tile_loadd(1, c + kLanes, kCRow);
    if constexpr (kRowTiles == 2) {
      _tile_loadd(2, c10, kCRow);
      _tile_loadd(3, c11, kCRow);
    }
  }
  for (int s = 0; s < words; s += kTileWords, a += kTileWords, b += kTileWords * S::kBStep) {
    if constexpr (Dot::kParts == 2) {
      load_a(a + S::kAPart);
      load_b(b);
      multiply();
      load_a(a);
      multiply();
      load_b(b + S::kBPart);
      multiply();
      if constexpr (Dot::kAllProducts) {
        load_a(a + S::kAPart);
        multiply();
      }
    } else {
      load_a(a);
      load_b(b);
      multiply();
    }
  }
  _tile_stored(0, c, kCRow);
  _tile_stored(1, c + kLanes, kCRow);
  if constexpr (kRowTiles == 2) {
    _tile_stored(2, c10, kCRow);
    _tile_stored(3, c11, kCRow);
  }
}

// Lanes whose scale is 1, as where the maximum stayed, cost nothing.
template <int kCRow>
void rescale(float* c, int rows, const Vec* scale) {
  for (int v = 0; v < kVecs; ++v) {
    if (_mm512_cmpneq_ps_mask(scale[v], set1(1.f)) == 0) continue;
    for (int r = 0; r < rows; ++r) {
      float* at = c + r * kCRow + v * kLanes;
      store(at, mul(load(at), scale[v]));
    }
  }
}

template <int kCRow>
FLASHSDK_HD void raise_maximum(const float* c, int rows, Vec* maximum) {
  Vec m[kVecs];
  for (int v = 0; v < kVecs; ++v) m[v] = maximum[v];
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) m[v] = max(m[v], load(c + r * kCRow + v * kLanes));
  for (int v = 0; v < kVecs; ++v) maximum[v] = m[v];
}

template <class Dot, class S, int kUsed = kVecs, class Start>
  requires(Dot::kTiles && kUsed == kVecs)
void product(const typename Dot::Word* a, const typename Dot::Word* b, int steps, float* c, int rows, Start start,
             Vec* maximum = nullptr, RowPrefetch* prefetch = nullptr) {
  static_assert(S::kAStep == 1);
  constexpr bool kFromZero = std::is_same_v<Start, FromZero>;
  constexpr int kBlockRows = 2 * kTileRows, kBlockLanes = 2 * kLanes;
  if constexpr (std::is_same_v<Start, FromScaledC>) rescale<S::kCRow>(c, rows, start.scale);
  const int end = Dot::padded_rows(rows);
  // The maximum is taken one block late: its loads then find the stores of the tiles done.
  int late = 0;
  auto raise_to = [&](int r) {
    if (maximum != nullptr) raise_maximum<S::kCRow>(c + late * S::kCRow, r - late, maximum);
    late = r;
  };
  for (int r = 0; r < end; r += kBlockRows) {
    for (int lane = 0; lane < kVecs * kLanes; lane += kBlockLanes) {
      const auto* block_a = a + r * S::kARow;
      float* block_c = c + r * S::kCRow + lane;
      if (r + kBlockRows <= end) {
        tile_block<Dot, S, 2, kFromZero>(block_a, b + lane, steps, block_c);
      } else {
        tile_block<Dot, S, 1, kFromZero>(block_a, b + lane, steps, block_c);
      }
      if (prefetch != nullptr) prefetch->advance(kRowsAheadOfBlock);
    }
    raise_to(r);
  }
  raise_to(end);
}

#else

// Nothing to prepare where products run on vectors.
FLASHSDK_HD void take_tile_registers() {}
FLASHSDK_HD void release_tile_registers() {}

#endif

// Calls f<n>() with the vectors that hold the first `lanes` lanes of a panel. Tile registers take whole panels.
template <class Dot, class F>
FLASHSDK_HD void with_vectors_of(int lanes, F f) {
  if constexpr (!Dot::kTiles) {
    if (lanes <= kLanes) return f.template operator()<1>();
    if constexpr (kVecs == 4) {
      if (lanes <= 2 * kLanes) return f.template operator()<2>();
      if (lanes <= 3 * kLanes) return f.template operator()<3>();
    }
  }
  f.template operator()<kVecs>();
}
static_assert(kVecs == 2 || kVecs == 4);

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
