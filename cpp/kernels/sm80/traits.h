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

// The same rows for each of kCopies warps: where they hold the scores of these together.
template <class Element, int kWarpsM, int kCopies>
using CopiedMma = cute::TiledMMA<cute::MMA_Atom<typename MmaInstruction<Element>::type>,
                                 Layout<Shape<Int<kWarpsM>, _1, Int<kCopies>>>,
                                 cute::Tile<DealtOut<kWarpsM, 16, 16>, DealtOut<1, 8, 16>, Int<16 * kCopies>>>;

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
// A tile's slabs lie one behind the other, so that some columns of it, whole slabs, are a tile as well. This one is of
// every tile that is so wide.
constexpr int kWideSlab = 64;

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
  static constexpr int kHeadDimV = kHeadDim, kColumnWarps = 1;
  static constexpr bool kValuesInKeys = false;  // see WideForwardTraits

  using Mma = WarpMma<Element, kWarps_, 1>;
  using MmaOut = Mma;
  using SmemQ = SmemTile<kBlockM, kHeadDim>;
  using SmemKV = SmemTile<kBlockN, kHeadDim>;
  using SmemK = SmemKV;
  using SmemV = SmemKV;
  using SmemOut = SmemQ;  // in Q's place
  static constexpr int kElements = SmemQ::kElements + 2 * kStages * SmemKV::kElements;
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Element)) * kElements;
};

// Heads too wide for a warp to hold 16 rows of their output: kColumnWarps warps side by side, each with some of the
// columns (sm80/column_warps.h). kValuesInKeys: v is the first columns of k, in the same memory, and V's tile is K's.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kWarps_, int kColumnWarps_,
          int kStages_, bool kValuesInKeys_, int kMinBlocks_, bool kAnyAlignment_>
struct WideForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kColumnWarps = kColumnWarps_, kRowWarps = kWarps_ / kColumnWarps_;
  static constexpr int kTileKeys = kBlockN;
  static constexpr int kStages = kStages_;
  static constexpr bool kValuesInKeys = kValuesInKeys_;
  static constexpr bool kFp8Kv = false;
  static constexpr bool kQInRegisters = false;
  static constexpr bool kAnyAlignment = kAnyAlignment_;
  static constexpr int kMinBlocks = kMinBlocks_;

  // Without V's tile there is room for a second of K.
  using WithValuesInKeys = WideForwardTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kWarps_, kColumnWarps_, 2,
                                             true, kMinBlocks, kAnyAlignment>;
  using Mma = CopiedMma<Element, kRowWarps, kColumnWarps>;  // where a thread's scores are
  using MmaOut = WarpMma<Element, kRowWarps, kColumnWarps>;
  using SmemQ = SmemTile<kBlockM, kHeadDim>;
  using SmemK = SmemTile<kBlockN, kHeadDim>;
  using SmemV = SmemTile<kBlockN, kHeadDimV>;
  using SmemOut = SmemTile<kBlockM, kHeadDimV>;
  static constexpr int kElements = SmemQ::kElements + kStages * (SmemK::kElements + !kValuesInKeys * SmemV::kElements);
  // Whether the warps side by side share out the keys of a tile; else each computes all scores.
  static constexpr bool kSharesScores = kBlockN % (16 * kColumnWarps) == 0;
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Element)) * kElements +
                                    kSharesScores * kBlockM * kBlockN * static_cast<int>(sizeof(float));
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

// Few rows of many keys. All rows are each warp's, and the keys are dealt to the warps: kBlockM rows that are dealt out
// would have every warp read all keys, and convert those of float8_e4m3fn. A warp copies tiles of kBlockN keys to
// kStages places of its own, and waits for nobody until its last one. Kv: Element, or std::uint8_t for float8_e4m3fn.
template <class Element_, class Kv_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kStages_,
          int kMinBlocks_>
struct FewRowsTraits {
  using Element = Element_;
  using Kv = Kv_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;  // of a warp
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps_;
  static constexpr int kHeadDimV = kHeadDim, kColumnWarps = 1;
  static constexpr bool kValuesInKeys = false;
  static constexpr int kRowWarps = 1;
  static constexpr int kTileKeys = kBlockN_ * kWarps_;
  static constexpr int kStages = kStages_;
  static constexpr bool kAnyAlignment = false;
  static constexpr bool kFp8Kv = sizeof(Kv) == 1;
  static constexpr int kMinBlocks = kMinBlocks_;
  static_assert(kBlockM == 16, "one atom of rows");

  // Side by side along the sum, warps have the same rows and columns of a tile, each of its own keys.
  using Mma =
      cute::TiledMMA<cute::MMA_Atom<typename MmaInstruction<Element>::type>, Layout<Shape<_1, _1, Int<kWarps_>>>>;
  using MmaOut = Mma;
  static constexpr int kCopiedBytes = kBlockN * kHeadDim * static_cast<int>(sizeof(Kv));  // K or V of a warp's stage
  static constexpr int kWarpBytes = kStages * 2 * kCopiedBytes;
  static constexpr int kQueriesAt = kWarps * kWarpBytes;
  static constexpr int kStatesAt = kQueriesAt + kBlockM * kHeadDim * static_cast<int>(sizeof(Element));  // of rows
  static constexpr int kSmemBytes = kStatesAt + kWarps * kBlockM * 2 * static_cast<int>(sizeof(float));
  static constexpr int kOutPitch = kHeadDim + (kFp8Kv ? 0 : 8);  // floats: 8 more, and stores reach all banks
  static_assert(kBlockM * kOutPitch * static_cast<int>(sizeof(float)) <= kWarpBytes,
                "a warp's output has no place where its keys had theirs");
};

// Whether the warps of a thread block have keys of their own, as those of FewRowsTraits.
template <class Traits>
inline constexpr bool kDealsKeys = Traits::kTileKeys != Traits::kBlockN;

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
  static constexpr int kHeadDimV = kHeadDim;
  static constexpr int kPiece = kHeadDim;  // see WideBackwardTraits
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

// Heads too wide for a thread block to hold dK and dV of as many keys: fewer keys, whose scores are too few products
// for all warps. kCopies groups of warps hold the same ones: one of these computes S, another dP. The columns of dQ, dK
// and dV are shared out to all (sm80/wide_backward.h).
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, int kCopies_, int kWarpsScores_,
          int kStages_, int kMinBlocks_, bool kStaggered_, bool kAnyAlignment_>
struct WideBackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kThreads = 32 * kWarps_, kScoreThreads = kThreads / kCopies_;
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kFp8Kv = false;
  static constexpr bool kAnyAlignment = kAnyAlignment_;
  static constexpr bool kStaggered = kStaggered_;
  static constexpr bool kWholeCalls = false;

  using MmaScores = WarpMma<Element, kWarpsScores_, kWarps_ / kCopies_ / kWarpsScores_>;  // (keys, queries)
  using MmaKeys = WarpMma<Element, 1, kWarps_>;                                           // (keys, head_dim)
  using MmaQueries = MmaKeys;                                                             // (queries, head_dim)
  static constexpr int kPiece = 16 * kWarps_;  // columns that are computed at a time, 16 a warp

  using SmemQ = SmemTile<kBlockM, kHeadDim>;
  using SmemKV = SmemTile<kBlockN, kHeadDim>;
  using SmemScores = SmemTile<kBlockN, kBlockM>;
  using SmemOut = SmemTile<kBlockM, kHeadDim>;
  static constexpr int kScoreBuffers = 2;
  struct Rows {
    cuda::LseTile<kBlockM> lse;
    float minus_delta[kBlockM];
  };
  static constexpr int kExchangeBytes = 2 * kBlockM * kBlockN * static_cast<int>(sizeof(float));  // S and dP
  static constexpr int kSmemBytes =
      static_cast<int>(sizeof(Element)) *
          (2 * SmemKV::kElements + 2 * kStages * SmemQ::kElements + kScoreBuffers * SmemScores::kElements) +
      kExchangeBytes + kStages * static_cast<int>(sizeof(Rows));
};

// Row::kRow is a row of the table. The parameters are in the kernels' names, with which these were measured.
template <class Row, class Traits>
struct OfRow {
  static_assert(Traits::kSmemBytes == table::smem_bytes(Row::kRow), "table::smem_bytes() says something else");
  using type = Traits;
};

template <class Row, class Element, bool kWide = (Row::kRow.column_warps > 1)>
struct ForwardTraitsOfRow
    : OfRow<Row, ForwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n, Row::kRow.warps,
                               Row::kRow.stages, Row::kRow.q_in_registers, Row::kRow.blocks, Row::kRow.any_alignment>> {
};
template <class Row, class Element>
struct ForwardTraitsOfRow<Row, Element, true>
    : OfRow<Row, WideForwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.head_dim.v, Row::kRow.tile.m,
                                   Row::kRow.tile.n, Row::kRow.warps, Row::kRow.column_warps, Row::kRow.stages, false,
                                   Row::kRow.blocks, Row::kRow.any_alignment>> {};
template <class Row, class Element>
using ForwardTraitsOf = typename ForwardTraitsOfRow<Row, Element>::type;

template <class Row, class Element>
using Fp8ForwardTraitsOf =
    typename OfRow<Row, Fp8ForwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n,
                                         Row::kRow.warps, Row::kRow.blocks, Row::kRow.any_alignment>>::type;
template <class Row, class Element, class Kv>
using FewRowsTraitsOfRow = typename OfRow<
    Row, FewRowsTraits<Element, Kv, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n / Row::kRow.warps,
                       Row::kRow.warps, Row::kRow.stages, Row::kRow.blocks>>::type;
template <class Row, class Element>
using FewRowsTraitsOf = FewRowsTraitsOfRow<Row, Element, Element>;
template <class Row, class Element>
using Fp8FewRowsTraitsOf = FewRowsTraitsOfRow<Row, Element, std::uint8_t>;

template <class Row, class Element, bool kWide = (Row::kRow.copies > 1)>
struct BackwardTraitsOfRow
    : OfRow<Row, BackwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n, Row::kRow.warps,
                                Row::kRow.warps_s, Row::kRow.warps_dk, Row::kRow.warps_dq, Row::kRow.blocks,
                                Row::kRow.staggered, Row::kRow.any_alignment>> {};
template <class Row, class Element>
struct BackwardTraitsOfRow<Row, Element, true>
    : OfRow<Row, WideBackwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.tile.m, Row::kRow.tile.n, Row::kRow.warps,
                                    Row::kRow.copies, Row::kRow.warps_s, Row::kRow.stages, Row::kRow.blocks,
                                    Row::kRow.staggered, Row::kRow.any_alignment>> {};
template <class Row, class Element>
using BackwardTraitsOf = typename BackwardTraitsOfRow<Row, Element>::type;

}  // namespace flashsdk::sm80
