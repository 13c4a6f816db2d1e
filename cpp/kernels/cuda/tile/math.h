// Device arithmetic shared by the GPU kernels.
#pragma once

#include <cfloat>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <cuda_runtime.h>
#include <cute/tensor.hpp>

namespace flashsdk::cuda {

// Compile-time extent of one mode of a CuTe tensor.
template <class Tensor, int kMode>
inline constexpr int kExtent = decltype(cute::size<kMode>(std::declval<const Tensor&>()))::value;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kScaleLimit = FLT_MAX / kLog2e;  // from here on a scale's product with log2(e) may be infinite

// Hides a value's origin from the compiler: what is computed from it is not kept in registers from tile to tile.
__device__ __forceinline__ std::int64_t opaque(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Tells the compiler that x, which is, is the same in all lanes, all of which take part: what is computed from it is
// then computed once for the warp.
template <class T>
__device__ __forceinline__ T warp_uniform(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// if (condition) body(), where the condition is the same for the whole warp. Written as a loop whose end no compiler
// knows (grids have no third dimension), so that it stays a branch: as predicated instructions, which ptxas makes even
// of large bodies, what is skipped would still take its issue slots. A body may take a zero that no compiler knows:
// what it computes with that is computed behind the branch, and not, as the same in every run of the loop, ahead of it.
template <class Body>
__device__ __forceinline__ void branch_if(bool condition, Body&& body) {
#pragma unroll 1
  for (unsigned runs = condition; runs > 0;) {
    if constexpr (std::is_invocable_v<Body, unsigned>) {
      body(runs - 1);
    } else {
      body();
    }
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(runs));
  }
}

// Ends a basic block, within which ptxas moves instructions freely: work of many registers before and behind it does
// not get mixed.
__device__ __forceinline__ void end_block() {
  branch_if(opaque(0) > 0, [] {});
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to the last bit but one, for all x whose reciprocal is finite, and without the call that a division may make.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / y to the last bit, or nearly so, where 1 / y is a normal number. From 2^127 on it is the largest float.
__device__ __forceinline__ float quotient(float x, float y) {
  const float inverse = reciprocal(y), q = x * inverse;
  return fabsf(q) >= 0x1p127f ? copysignf(FLT_MAX, q) : fmaf(fmaf(-q, y, x), inverse, q);
}

// fmaxf, but NaN stays NaN.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// Through exp2 and a reciprocal, and the Taylor series where their difference would cancel: some 1e-6 of relative
// error, where tanh.approx has 5e-4.
__device__ __forceinline__ float tanh_accurate(float x) {
  const float e = exp2_approx(2.f * kLog2e * x), x2 = x * x;
  const float series = fmaf(fmaf(fmaf(-17.f / 315.f, x2, 2.f / 15.f), x2, -1.f / 3.f) * x2, x, x);
  return fabsf(x) < 0.1f ? series : 1.f - __fdividef(2.f, e + 1.f);
}

// Over the four lanes that share a row of an mma accumulator.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace flashsdk::cuda
