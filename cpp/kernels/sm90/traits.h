// Shared-memory layouts and products of one warpgroup: what forward and backward know at compile time.
#pragma once

#include <type_traits>

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "common/tile_walk.h"
#include "table/sm90.h"

namespace flashsdk::sm90 {

using cute::_1;
using cute::_2;
using cute::_3;
using cute::Int;
using cute::Layout;
using cute::Shape;
using cute::Step;
using cute::Stride;

constexpr int kWarpgroup = 128;     // threads
constexpr int kWarpgroupRows = 64;  // rows of a product of one warpgroup

// A (rows, columns) tile of 16-bit elements as TMA boxes write it: slabs of 64 columns (32 where 64 does not divide),
// each with its rows of 128 (64) bytes one behind another, swizzled. kBuffers of them follow each other.
template <class Element, int kRows_, int kColumns_, int kBuffers_ = 1>
struct SmemTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kBuffers = kBuffers_;
  static constexpr int kSlabColumns = kColumns % 64 == 0 ? 64 : 32;
  static constexpr int kSlabs = kColumns / kSlabColumns;
  static constexpr int kElements = kRows * kColumns;
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(Element));
  static constexpr int kSlabBytes = kBytes / kSlabs;
  static_assert(kColumns % kSlabColumns == 0 && kRows % 8 == 0);

  using KMajorAtom = std::conditional_t<kSlabColumns == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MNMajorAtom = std::conditional_t<kSlabColumns == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  // (rows, columns, buffers): operand of a product that sums over columns (wgmma's "K-major").
  using RowMajor = decltype(cute::tile_to_shape(KMajorAtom{}, Shape<Int<kRows>, Int<kColumns>, Int<kBuffers>>{}));
  // (columns, rows, buffers): operand of a product that sums over rows ("MN-major").
  using Transposed = decltype(cute::tile_to_shape(MNMajorAtom{}, Shape<Int<kColumns>, Int<kRows>, Int<kBuffers>>{},
                                                  Step<_2, _1, _3>{}));
};

// How the summed index of an operand in shared memory lies: contiguous (RowMajor) or strided (Transposed).
constexpr auto kSumContiguous = cute::GMMA::Major::K;
constexpr auto kSumStrided = cute::GMMA::Major::MN;

// Whether one wgmma has so many columns here. cute would take several of 16 else, and say nothing.
#if defined(CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED)
constexpr bool one_wgmma(int columns) { return columns % 8 == 0 && columns <= 256; }
#else
constexpr bool one_wgmma(int columns) { return table::is_default_wgmma(columns); }
#endif

// 64 x kColumns products of one warpgroup over kSum: A from shared memory, or from registers.
template <class Element, int kColumns, int kSum, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
using SmemMma = std::enable_if_t<
    one_wgmma(kColumns),
    decltype(cute::make_tiled_mma(
        cute::GMMA::ss_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kSum>>,
                                   kMajorA, kMajorB>()))>;
template <class Element, int kColumns, int kSum, cute::GMMA::Major kMajorB>
using RegisterMma = std::enable_if_t<
    one_wgmma(kColumns),
    decltype(cute::make_tiled_mma(
        cute::GMMA::rs_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kColumns>, Int<kSum>>,
                                   kSumContiguous, kMajorB>()))>;

}  // namespace flashsdk::sm90
