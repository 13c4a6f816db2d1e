// Accumulator fragments of mma.m16n8 and wgmma as matrices of the rows and columns that a thread holds.
#pragma once

#include <cstdint>

#include <cutlass/numeric_conversion.h>
#include <cute/tensor.hpp>

namespace flashsdk::cuda {

// An accumulator ((2, 2), M, N) seen as a matrix ((2, M), (2, N)).
template <class AccLayout>
__host__ __device__ constexpr auto matrix_layout(const AccLayout& l) {
  return cute::make_layout(cute::make_layout(cute::get<0, 1>(l), cute::get<1>(l)),
                           cute::make_layout(cute::get<0, 0>(l), cute::get<2>(l)));
}

// 16-bit fragments are written by words of two elements. By elements, or by the 8 and 16 bytes that cute::copy takes,
// the compiler pulls every pair apart and puts it together again: 380 instructions more in the SM90 forward.
template <class From, class To>
__device__ void copy_words(const From& from, To& to) {
  const auto source = cute::recast<const std::uint32_t>(from);
  auto target = cute::recast<std::uint32_t>(to);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(target); ++i) target(i) = source(i);
}

// Two floats as a word of two elements of 16 bits.
template <class Element>
__device__ std::uint32_t pack(float first, float second) {
  const cutlass::NumericArrayConverter<Element, float, 2> converter;
  const cutlass::Array<Element, 2> pair = converter(cutlass::Array<float, 2>{first, second});
  return reinterpret_cast<const std::uint32_t&>(pair);
}

// fp32 to 16 bits, layout kept.
template <class Element, class Accumulator>
__device__ auto convert(const Accumulator& acc) {
  auto result = cute::make_tensor<Element>(acc.layout());
  auto words = cute::recast<std::uint32_t>(result);
  const auto pairs = cute::recast<const cutlass::Array<float, 2>>(acc);
  CUTE_UNROLL
  for (int i = 0; i < cute::size(words); ++i) words(i) = pack<Element>(pairs(i)[0], pairs(i)[1]);
  return result;
}

}  // namespace flashsdk::cuda
