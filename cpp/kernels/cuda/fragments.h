// Accumulator fragments of mma.m16n8 and wgmma as matrices of the rows and columns that a thread holds.
#pragma once

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

namespace flashsdk::cuda {

// An accumulator ((2, 2), M, N) seen as a matrix ((2, M), (2, N)).
template <class AccLayout>
__host__ __device__ constexpr auto matrix_layout(const AccLayout& l) {
  return cute::make_layout(cute::make_layout(cute::get<0, 1>(l), cute::get<1>(l)),
                           cute::make_layout(cute::get<0, 0>(l), cute::get<2>(l)));
}

// fp32 to 16 bits, layout kept.
template <class Element, class Accumulator>
__device__ auto convert(const Accumulator& acc) {
  constexpr int kSize = decltype(cute::size(acc))::value;
  auto result = cute::make_tensor<Element>(acc.layout());
  cutlass::NumericArrayConverter<Element, float, kSize> converter;
  *reinterpret_cast<cutlass::Array<Element, kSize>*>(result.data()) =
      converter(*reinterpret_cast<const cutlass::Array<float, kSize>*>(acc.data()));
  return result;
}

}  // namespace flashsdk::cuda
