// Tile sizes, warp layouts and shared-memory layouts of the SM80 kernels: everything known at compile time.
#pragma once

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "common/tile_walk.h"
#include "cuda/pass/backward_workspace.h"
#include "table/sm80.h"

namespace flashsdk::sm80 {

using cute::_1;
using cute::_16;
using cute::_8;
using cute::Int;
using cute::Layout;
using cute::Shape;
using cute::Stride;

template <class Element>
struct MmaInstruction;
template <>
struct MmaInstruction<cutlass::half_t> {
  using type = cute::SM80_16x8x16_F32F16F16F32_TN;
};
template <>
struct MmaInstruction<cutlass::bfloat16_t> {
  using type = cute::SM80_16x8x16_F32BF16BF16F32_TN;
};

// Rows or columns of a product, kEach of them in turn for each of kWarps warps, in atoms of kAtom.
template <int kWarps, int kAtom, int kEach>
using DealtOut = Layout<Shape<Int<kAtom>, Int<kWarps>, Int<kEach / kAtom>>, Stride<_1, Int<kEach>, Int<kAtom>>>;

// kWarpsM x kWarpsN warps side by side; 16 columns a warp, so that one ldmatrix.x4 feeds two products.
template <class Element, int kWarpsM, int kWarpsN, int kRowsEach = 16>
using WarpMma = cute::TiledMMA<cute::MMA_Atom<typename MmaInstruction<Element>::type>,
                               Layout<Shape<Int<kWarpsM>, Int<kWarpsN>, _1>>,
                               cute::Tile<DealtOut<kWarpsM, 16, kRowsEach>, DealtOut<kWarpsN, 8, 16>, _16>>;

// Columns of one swizzled slab: 128 bytes where the tile is that wide.
constexpr int slab_columns(int columns) { return columns % 64 == 0 ? 64 : columns % 32 == 0 ? 32 : 16; }

// A row-major (rows, columns) tile of 16-bit elements. The XOR swizzle spreads the eight 16-byte rows that an ldmatrix
// reads, and the accumulator rows that are written back, over all banks.
template <int kRows, int kColumns>
struct SmemTile {
  static constexpr int kSlab = slab_columns(kColumns);
  static constexpr int kSwizzleBits = kSlab == 64 ? 3 : kSlab == 32 ? 2 : 1;
  using Atom = decltype(cute::composition(cute::Swizzle<kSwizzleBits, 3, 3>{},
                                          Layout<Shape<_8, Int<kSlab>>, Stride<Int<kSlab>, _1>>{}));
  using RowMajor = decltype(cute::tile_to_shape(Atom{}, Shape<Int<kRows>, Int<kColumns>>{}));  // (rows, columns)
  using Transposed = decltype(cute::composition(
      RowMajor{}, Layout<Shape<Int<kColumns>, Int<kRows>>, Stride<Int<kRows>, _1>>{}));  // (columns, rows)
  static constexpr int kElements = kRows * kColumns;
};

// kAnyAlignment: takes tensors that are not aligned to 16 bytes, and head dimensions that are no multiple of 8.
// kStages: buffers of K and V. With one, loads overlap with half an iteration; with two, with a whole one, and an
// iteration has one barrier instead of two.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, bool kQInRegisters_,
          int kMinBlocks_, bool kAnyAlignment_ = false>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kRowWarps = kWarps_;  // that a tile's rows are dealt to
  static constexpr int kTileKeys = kBlockN;  // of a thread block's tile
  static constexpr int kStages = kStages_;
  static constexpr bool kQInRegisters = kQInRegisters_;
  static constexpr bool kAnyAlignment = kAnyAlignment_;
  static constexpr bool kFp8Kv = false;
  static constexpr int kMinBlocks = kMinBlocks_;  // thread blocks a multiprocessor should hold: caps the registers

  using Mma = WarpMma<Element, kWarps_, 1>;
  using SmemQ = SmemTile<kBlockM, kHeadDim>;
  using SmemKV = SmemTile<kBlockN, kHeadDim>;
  static constexpr int kSmemBytes =
      static_cast<int>(sizeof(Element)) * (SmemQ::kElements + 2 * kStages * SmemKV::kElements);
};

// K and V are float8_e4m3fn in memory. They are copied as they are, each thread's vectors to a place of its own, and
// from there become the tiles of 16 bits that the products take.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kMinBlocks_, bool kAnyAlignment_>
struct Fp8ForwardTraits
    : ForwardTraits<Element_, kHeadDim_, kBlockM_, kBlockN_, kWarps_, 1, false, kMinBlocks_, kAnyAlignment_> {
  using Tiles = ForwardTraits<Element_, kHeadDim_, kBlockM_, kBlockN_, kWarps_, 1, false, kMinBlocks_, kAnyAlignment_>;
  static constexpr bool kFp8Kv = true;
  static constexpr int kCopiedBytes = Tiles::SmemKV::kElements;  // of K or V, as they are in memory
  static constexpr int kSmemBytes = Tiles::kSmemBytes + 2 * kCopiedBytes;
};

// Few rows of many such keys. All rows are each warp's, and the keys are dealt to the warps, which convert them in
// registers: each element once, while kBlockM rows that are dealt out would have every warp read and convert all keys.
// A warp copies tiles of kBlockN keys to kStages places of its own, and waits for nobody until its last one.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_, int kMinBlocks_>
struct Fp8SplitTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;  // of a warp
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kRowWarps = 1;
  static constexpr int kTileKeys = kBlockN_ * kWarps_;
  static constexpr int kStages = kStages_;
  static constexpr bool kAnyAlignment = false;
  static constexpr bool kFp8Kv = true;
  static constexpr int kMinBlocks = kMinBlocks_;
  static_assert(kBlockM == 16, "one atom of rows");

  // Side by side along the sum, warps have the same rows and columns of a tile, each of its own keys.
  using Mma =
      cute::TiledMMA<cute::MMA_Atom<typename MmaInstruction<Element>::type>, Layout<Shape<_1, _1, Int<kWarps_>>>>;
  static constexpr int kCopiedBytes = kBlockN * kHeadDim;  // of K or V, of a stage of a warp
  static constexpr int kSmemBytes = kWarps * kStages * 2 * kCopiedBytes +
                                    kBlockM * kHeadDim * static_cast<int>(sizeof(Element)) +
                                    kWarps * kBlockM * 2 * static_cast<int>(sizeof(float));  // states of rows
  static_assert(kBlockM * kHeadDim * static_cast<int>(sizeof(float)) <= kStages * 2 * kCopiedBytes,
                "a warp's output has no place where its keys had theirs");
};

// The key rows of a tile are dealt to the warps. Sᵀ and dPᵀ are computed with keys as rows: where every warp owns
// whole key rows (kWarpsN == kWarps), their accumulators are the register operands of dV += Pᵀ·dO and dK += dSᵀ·Q,
// and only dS goes through shared memory, for dQ. Otherwise P goes there as well.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kWarpsScores_, int kWarpsKeys_,
          int kWarpsQueries_, int kMinBlocks_, bool kStaggered_, bool kAnyAlignment_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kStages = 2;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kAnyAlignment = kAnyAlignment_;
  static constexpr bool kFp8Kv = false;
  static constexpr bool kStaggered = kStaggered_;  // see QueryStream: it pays for some tiles and costs for others
  static constexpr bool kRegisterOperands = kWarpsScores_ == kWarps_ && kWarpsKeys_ == kWarps_;

  // 32 neighbouring keys a warp, where there are as many: what a call of the dropout generator decides.
  static constexpr bool kWholeCalls = kBlockN % (32 * kWarpsScores_) == 0 && kBlockN % (32 * kWarpsKeys_) == 0;
  static constexpr int kKeysEach = kWholeCalls ? 32 : 16;
  using MmaScores = WarpMma<Element, kWarpsScores_, kWarps_ / kWarpsScores_, kKeysEach>;  // (keys, queries)
  using MmaKeys = WarpMma<Element, kWarpsKeys_, kWarps_ / kWarpsKeys_, kKeysEach>;        // (keys, head_dim)
  using MmaQueries = WarpMma<Element, kWarpsQueries_, kWarps_ / kWarpsQueries_>;          // (queries, head_dim)

  using SmemQ = SmemTile<kBlockM, kHeadDim>;  // also dO
  using SmemKV = SmemTile<kBlockN, kHeadDim>;
  using SmemScores = SmemTile<kBlockN, kBlockM>;  // dSᵀ, Pᵀ
  using SmemOut = SmemTile<kBlockM, kHeadDim>;    // dQ on its way out
  static constexpr int kScoreBuffers = kRegisterOperands ? 1 : 2;
  struct Rows {  // of a tile of queries
    cuda::LseTile<kBlockM> lse;
    float minus_delta[kBlockM];
  };
  static constexpr int kSmemBytes =
      static_cast<int>(sizeof(Element)) *
          (2 * SmemKV::kElements + 2 * kStages * SmemQ::kElements + kScoreBuffers * SmemScores::kElements) +
      kStages * static_cast<int>(sizeof(Rows));
};

// Row::kRow is a row of the table. The parameters are in the kernels' names, with which these were measured.
template <class Row, class Traits>
struct OfRow {
  static_assert(Traits::kSmemBytes == table::smem_bytes(Row::kRow), "table::smem_bytes() says something else");
  using type = Traits;
};
template <class Row, class Element>
using ForwardTraitsOf = typename OfRow<
    Row, ForwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n, Row::kRow.warps,
                       Row::kRow.stages, Row::kRow.q_in_registers, Row::kRow.blocks, Row::kRow.any_alignment>>::type;
template <class Row, class Element>
using Fp8ForwardTraitsOf =
    typename OfRow<Row, Fp8ForwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n,
                                         Row::kRow.warps, Row::kRow.blocks, Row::kRow.any_alignment>>::type;
template <class Row, class Element>
using Fp8SplitTraitsOf =
    typename OfRow<Row,
                   Fp8SplitTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n / Row::kRow.warps,
                                  Row::kRow.warps, Row::kRow.stages, Row::kRow.blocks>>::type;
template <class Row, class Element>
using BackwardTraitsOf =
    typename OfRow<Row, BackwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n,
                                       Row::kRow.warps, Row::kRow.warps_s, Row::kRow.warps_dk, Row::kRow.warps_dq,
                                       Row::kRow.blocks, Row::kRow.staggered, Row::kRow.any_alignment>>::type;

}  // namespace flashsdk::sm80
