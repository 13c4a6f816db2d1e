// The element types of the GPU kernels, as the host names them.
#pragma once

#include <cutlass/numeric_types.h>

#include "common/params.h"

namespace flashsdk::cuda {

template <class Element>
constexpr DType dtype_of() = delete;
template <>
constexpr DType dtype_of<cutlass::half_t>() {
  return DType::kFloat16;
}
template <>
constexpr DType dtype_of<cutlass::bfloat16_t>() {
  return DType::kBFloat16;
}
template <class Element>
inline constexpr DType kDType = dtype_of<Element>();

}  // namespace flashsdk::cuda
