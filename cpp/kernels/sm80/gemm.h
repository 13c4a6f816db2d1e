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
};

template <class Fragment>
struct RegisterOperand {
  Fragment& fragment;
  __device__ void fetch(int) {}
};
template <class Fragment>
RegisterOperand(Fragment&) -> RegisterOperand<Fragment>;

// How an operand lies in shared memory: with the summed index contiguous, or the other one.
struct SumContiguous {
  using Ldmatrix = cute::SM75_U32x4_LDSM_N;
};
struct SumStrided {
  using Ldmatrix = cute::SM75_U16x8_LDSM_T;
};

// smem is (rows of the product, summed index) for A and (columns of the product, summed index) for B.
template <class Order, class Mma, class SmemTensor>
__device__ auto operand_a(Mma mma, const SmemTensor& smem, Order) {
  using Element = typename SmemTensor::value_type;
  auto copy = cute::make_tiled_copy_A(cute::Copy_Atom<typename Order::Ldmatrix, Element>{}, mma);
  auto plain = cute::make_tensor(smem.data(), cute::make_layout(cute::shape(smem)));
  auto fragment = mma.get_thread_slice(threadIdx.x).partition_fragment_A(plain);
  auto source = copy.get_thread_slice(threadIdx.x).partition_S(smem);
  return SmemOperand<decltype(copy), decltype(source), decltype(fragment)>{source, fragment};
}
template <class Order, class Mma, class SmemTensor>
__device__ auto operand_b(Mma mma, const SmemTensor& smem, Order) {
  using Element = typename SmemTensor::value_type;
  auto copy = cute::make_tiled_copy_B(cute::Copy_Atom<typename Order::Ldmatrix, Element>{}, mma);
  auto plain = cute::make_tensor(smem.data(), cute::make_layout(cute::shape(smem)));
  auto fragment = mma.get_thread_slice(threadIdx.x).partition_fragment_B(plain);
  auto source = copy.get_thread_slice(threadIdx.x).partition_S(smem);
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

// An accumulator seen as a matrix of this thread's rows and columns.
template <class Accumulator>
__device__ auto as_matrix(Accumulator& acc) {
  return cute::make_tensor(acc.data(), cuda::matrix_layout(acc.layout()));
}

// The (row, column) inside the tile of each element of as_matrix(acc).
template <int kRows, int kColumns, class Mma>
__device__ auto matrix_coordinates(Mma mma) {
  auto c =
      mma.get_thread_slice(threadIdx.x).partition_C(cute::make_identity_tensor(Shape<Int<kRows>, Int<kColumns>>{}));
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
__device__ void store_accumulator(Mma mma, const Fragment& fragment, SmemTensor&& smem) {
  using Element = typename Fragment::value_type;
  auto copy =
      cute::make_tiled_copy_C(cute::Copy_Atom<cute::AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, mma);
  auto thread_copy = copy.get_thread_slice(threadIdx.x);
  cute::copy(copy, thread_copy.retile_S(fragment), thread_copy.partition_D(smem));
}

}  // namespace flashsdk::sm80
