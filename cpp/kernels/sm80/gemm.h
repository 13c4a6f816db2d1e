// Tile products on mma.sync: operands in shared memory or registers, accumulators in registers.
#pragma once

#include <cute/tensor.hpp>

#include "cuda/tile/fragments.h"
#include "sm80/traits.h"

namespace flashsdk::sm80 {

using cuda::convert;

// An operand in shared memory as one thread sees it: fetch(k) brings the k-th slice of 16 into its registers.
template <class TiledCopy, class Source, class Fragment>
struct SmemOperand {
  Source source;
  Fragment fragment;

  __device__ void fetch(int k) {
    auto target = TiledCopy{}.get_thread_slice(threadIdx.x).retile_D(fragment);
    cute::copy(TiledCopy{}, source(cute::_, cute::_, k), target(cute::_, cute::_, k));
  }
  // The same of a tile that lies so many elements behind.
  __device__ void fetch(int k, int offset) {
    const auto behind = cute::make_tensor(source.data() + offset, source.layout());
    auto target = TiledCopy{}.get_thread_slice(threadIdx.x).retile_D(fragment);
    cute::copy(TiledCopy{}, behind(cute::_, cute::_, k), target(cute::_, cute::_, k));
  }
};

template <class Fragment>
struct RegisterOperand {
  Fragment& fragment;
  __device__ void fetch(int) {}
};
template <class Fragment>
RegisterOperand(Fragment&) -> RegisterOperand<Fragment>;

// A SmemTile.
template <class Tile, class Element>
__device__ auto row_major(Element* tile) {
  return cute::make_tensor(cute::make_smem_ptr(tile), typename Tile::RowMajor{});
}
template <class Tile, class Element>
__device__ auto transposed(Element* tile) {
  return cute::make_tensor(cute::make_smem_ptr(tile), typename Tile::Transposed{});
}

// How an operand lies in shared memory: with the summed index contiguous, or the other one.
struct SumContiguous {
  using Ldmatrix = cute::SM75_U32x4_LDSM_N;
};
struct SumStrided {
  using Ldmatrix = cute::SM75_U16x8_LDSM_T;
};

// smem is (rows of the product, summed index) for A and (columns of the product, summed index) for B. thread: of those
// that compute the product.
template <class Order, class Mma, class SmemTensor>
__device__ auto operand_a(Mma mma, const SmemTensor& smem, Order, unsigned thread = threadIdx.x) {
  using Element = typename SmemTensor::value_type;
  auto copy = cute::make_tiled_copy_A(cute::Copy_Atom<typename Order::Ldmatrix, Element>{}, mma);
  auto plain = cute::make_tensor(smem.data(), cute::make_layout(cute::shape(smem)));
  auto fragment = mma.get_thread_slice(thread).partition_fragment_A(plain);
  auto source = copy.get_thread_slice(thread).partition_S(smem);
  return SmemOperand<decltype(copy), decltype(source), decltype(fragment)>{source, fragment};
}
template <class Order, class Mma, class SmemTensor>
__device__ auto operand_b(Mma mma, const SmemTensor& smem, Order, unsigned thread = threadIdx.x) {
  using Element = typename SmemTensor::value_type;
  auto copy = cute::make_tiled_copy_B(cute::Copy_Atom<typename Order::Ldmatrix, Element>{}, mma);
  auto plain = cute::make_tensor(smem.data(), cute::make_layout(cute::shape(smem)));
  auto fragment = mma.get_thread_slice(thread).partition_fragment_B(plain);
  auto source = copy.get_thread_slice(thread).partition_S(smem);
  return SmemOperand<decltype(copy), decltype(source), decltype(fragment)>{source, fragment};
}

// acc += A·Bᵀ. Slice k + 1 is fetched under the products of slice k.
template <class Mma, class Accumulator, class OperandA, class OperandB>
__device__ void gemm(Mma mma, Accumulator& acc, OperandA&& a, OperandB&& b) {
  constexpr int kSteps = decltype(cute::size<2>(b.fragment))::value;
  a.fetch(0);
  b.fetch(0);
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    if (k + 1 < kSteps) {
      a.fetch(k + 1);
      b.fetch(k + 1);
    }
    cute::gemm(mma, a.fragment(cute::_, cute::_, k), b.fragment(cute::_, cute::_, k), acc);
  }
}

// The tiles of heads wider than 256, whose columns are so many that most calls have fewer: a product is over those that
// there are.

// acc += A·Bᵀ, summed over the first `columns` of both. Behind them both are zero, up to a whole slab.
template <int kRowsA, int kRowsB, class Mma, class Accumulator, class Element>
__device__ void gemm_by_slabs(Mma mma, Accumulator& acc, Element* a_tile, Element* b_tile, int columns, int thread) {
  constexpr int kSteps = kWideSlab / 16;
  auto a = operand_a(mma, row_major<SmemTile<kRowsA, kWideSlab>>(a_tile), SumContiguous{}, thread);
  auto b = operand_b(mma, row_major<SmemTile<kRowsB, kWideSlab>>(b_tile), SumContiguous{}, thread);
  const int slabs = ceil_div(columns, kWideSlab);
  a.fetch(0);
  b.fetch(0);
#pragma unroll 1
  for (int slab = 0; slab < slabs; ++slab) {
    const int next = min_of(slab + 1, slabs - 1);  // behind the last nothing is used
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      const int from = (k + 1 < kSteps ? slab : next) * kWideSlab;
      a.fetch((k + 1) % kSteps, from * kRowsA);
      b.fetch((k + 1) % kSteps, from * kRowsB);
      cute::gemm(mma, a.fragment(cute::_, cute::_, k), b.fragment(cute::_, cute::_, k), acc);
    }
  }
}

// acc(rows, the first `columns`) += A·B, kPiece columns at a time. A is in registers, B (kSum, columns of acc) in
// shared memory.
template <int kPiece, int kSum, class Mma, class Accumulator, class FragmentA, class Element>
__device__ void gemm_by_pieces(Mma mma, Accumulator& acc, FragmentA& a, Element* b_tile, int columns) {
  using Part = decltype(cute::partition_fragment_C(
      mma, Shape<Int<decltype(cute::size<1>(acc))::value * cute::tile_size<0>(Mma{})>, Int<kPiece>>{}));
  constexpr int kElements = decltype(cute::size(Part{}))::value, kPieces = decltype(cute::size(acc))::value / kElements;
  CUTE_UNROLL
  for (int piece = 0; piece < kPieces; ++piece) {
    if (piece * kPiece < columns) {
      auto part = cute::make_tensor(acc.data() + piece * kElements, typename Part::layout_type{});
      gemm(mma, part, RegisterOperand{a},
           operand_b(mma, transposed<SmemTile<kSum, kPiece>>(b_tile + piece * kPiece * kSum), SumStrided{}));
    }
  }
}

// The atoms of an accumulator, 16 bytes a thread each, by shared memory to a thread that holds the same elements of it:
// (atoms, kThreads).
template <int kThreads, class Accumulator>
__device__ void write_atoms(const Accumulator& acc, float4* shared, int thread) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    shared[i / 4 * kThreads + thread] = {acc(i), acc(i + 1), acc(i + 2), acc(i + 3)};
  }
}
template <int kThreads, class Accumulator>
__device__ void read_atoms(Accumulator& acc, const float4* shared, int thread) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); i += 4) {
    const float4 atom = shared[i / 4 * kThreads + thread];
    acc(i) = atom.x;
    acc(i + 1) = atom.y;
    acc(i + 2) = atom.z;
    acc(i + 3) = atom.w;
  }
}

// An accumulator seen as a matrix of this thread's rows and columns.
template <class Accumulator>
__device__ auto as_matrix(Accumulator& acc) {
  return cute::make_tensor(acc.data(), cuda::matrix_layout(acc.layout()));
}

// The (row, column) inside the tile of each element of as_matrix(acc).
template <int kRows, int kColumns, class Mma>
__device__ auto matrix_coordinates(Mma mma, unsigned thread = threadIdx.x) {
  auto c = mma.get_thread_slice(thread).partition_C(cute::make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
  return cute::make_tensor(c.data(), cuda::matrix_layout(c.layout()));
}

// The accumulator of one product as operand A of the next: two neighbouring 16x8 accumulators are one 16x16 operand.
template <class Fragment>  // ((2, 2), M, N)
__device__ auto as_operand_a(Fragment& acc) {
  auto l = cute::logical_divide(acc.layout(), Shape<cute::Underscore, cute::Underscore, cute::_2>{});
  auto layout = cute::make_layout(cute::make_layout(cute::get<0>(l), cute::get<2, 0>(l)), cute::get<1>(l),
                                  cute::get<2, 1>(l));  // ((4, 2), M, N / 2)
  return cute::make_tensor(acc.data(), layout);
}

// Writes a 16-bit accumulator fragment to its tile in shared memory.
template <class Mma, class Fragment, class SmemTensor>
__device__ void store_accumulator(Mma mma, const Fragment& fragment, SmemTensor&& smem, unsigned thread = threadIdx.x) {
  using Element = typename Fragment::value_type;
  auto copy =
      cute::make_tiled_copy_C(cute::Copy_Atom<cute::AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, mma);
  auto thread_copy = copy.get_thread_slice(thread);
  cute::copy(copy, thread_copy.retile_S(fragment), thread_copy.partition_D(smem));
}

}  // namespace flashsdk::sm80
