// Device arithmetic shared by the GPU kernels.
#pragma once

#include <cstdint>
#include <utility>

#include <cuda_runtime.h>
#include <cute/tensor.hpp>

namespace flashsdk::cuda {

// Compile-time extent of one mode of a CuTe tensor.
template <class Tensor, int kMode>
inline constexpr int kExtent = decltype(cute::size<kMode>(std::declval<const Tensor&>()))::value;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Hides a value's origin from the compiler: what is computed from it is not kept in registers from one tile to the next.
__device__ __forceinline__ std::int64_t opaque(std::int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// if (condition) body(), where the condition is the same for the whole warp. Written as a loop whose end no compiler
// knows (grids have one dimension), so that it stays a branch: as predicated instructions, which ptxas makes even of
// large bodies, what is skipped would still take its issue slots.
template <class Body>
__device__ __forceinline__ void branch_if(bool condition, Body&& body) {
#pragma unroll 1
  for (unsigned runs = condition; runs > 0;) {
    body();
    asm volatile("mov.u32 %0, %%ctaid.z;" : "=r"(runs));
  }
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Through exp2 and a reciprocal: some 1e-7 of absolute error, where tanh.approx has 5e-4.
__device__ __forceinline__ float tanh_accurate(float x) {
  float e = exp2_approx(2.f * kLog2e * x);
  return 1.f - __fdividef(2.f, e + 1.f);
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
