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
// Null, or why kernels of fp8 keys and values, or of those of q's type, do not take a call.
inline const char* refuse_dtype_kv(const ForwardParams& p, bool fp8) {
  if (p.fp8_kv() == fp8) return nullptr;
  return fp8 ? "k and v are not float8_e4m3fn" : "k and v are float8_e4m3fn";
}

template <class Element>
inline constexpr DType kDType = dtype_of<Element>();

}  // namespace flashsdk::cuda
