#include "cuda/cache/kv_append.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <cutlass/numeric_types.h>

#include "common/fp8.h"
#include "cuda/host/launch.h"

namespace flashsdk::cuda {
namespace {

constexpr int kThreads = 128, kWarp = 32;

template <class T>
__device__ float cosine(const void* data, std::int64_t at, bool float32) {
  return float32 ? static_cast<const float*>(data)[at] : static_cast<float>(static_cast<const T*>(data)[at]);
}

using Fp8 = std::uint8_t;  // float8_e4m3fn, by its bits

// An element as it lies in a cache or in q_out.
template <class To, class T>
__device__ To stored(T x, float descale) {
  if constexpr (std::is_same_v<To, T>)
    return x;
  else if constexpr (std::is_same_v<To, Fp8>)
    return fp8_from_float(__fdiv_rn(static_cast<float>(x), descale));
  else
    return static_cast<To>(x);
}

// Elements `begin` to `end`, by a warp.
template <class T, class To>
__device__ void copy(const T* from, int begin, int end, float descale, To* to) {
  for (int c = begin + threadIdx.x % kWarp; c < end; c += kWarp) to[c] = stored<To>(from[c], descale);
}

// One head at a position, by a warp; `from` and `to` are other memory. No product is fused with a sum: kv_append.cpp.
template <class T, class To>
__device__ void rotate(const RotaryParam& r, int position, const T* from, int dim, float descale, To* to) {
  const int lane = threadIdx.x % kWarp;
  for (int n = lane; n < r.pairs; n += kWarp) {
    const float cos = cosine<T>(r.cos, position * r.cos_row + n, r.float32);
    const float sin = cosine<T>(r.sin, position * r.sin_row + n, r.float32);
    const float x = static_cast<float>(from[r.first(n)]), y = static_cast<float>(from[r.second(n)]);
    to[r.first(n)] = stored<To>(x * cos - y * sin, descale);
    to[r.second(n)] = stored<To>(y * cos + x * sin, descale);
  }
  copy(from, 2 * r.pairs, dim, descale, to);
}

template <class T, class Cache>
__device__ void add_key(const AppendParams& p, int batch, int j, int head) {
  const int key = p.used[batch] + j;
  rotate(p.rotary, key, row_of<const T>(p.k, batch, j) + head * p.k.head, p.head_dim, p.k_descale.of(batch, head),
         p.cache<Cache>(p.k_cache, batch).at(key) + head * p.k_cache.head);
  copy(row_of<const T>(p.v, batch, j) + head * p.v.head, 0, p.head_dim_v, p.v_descale.of(batch, head),
       p.cache<Cache>(p.v_cache, batch).at(key) + head * p.v_cache.head);
}

template <class T>
__device__ void turn_query(const AppendParams& p, int batch, int i, int head) {
  rotate(p.rotary, p.position_of_query(batch, i), row_of<const T>(p.q, batch, i) + head * p.q.head, p.head_dim, 1.f,
         row_of<T>(p.q_out, batch, i) + head * p.q_out.head);
}

// A warp a head of a row, first those of keys. Of tensors of T, and caches of Cache.
template <class T, class Cache>
__global__ void __launch_bounds__(kThreads) kv_append_kernel(const __grid_constant__ AppendParams p) {
  const std::int64_t keys = std::int64_t{p.batch} * p.added * p.num_heads_kv;
  const std::int64_t all = keys + std::int64_t{p.batch} * p.queries * p.num_heads;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / kWarp);
  for (std::int64_t n = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp; n < all; n += warps) {
    const bool is_key = n < keys;
    const int heads = is_key ? p.num_heads_kv : p.num_heads, rows = is_key ? p.added : p.queries;
    const std::int64_t row = (is_key ? n : n - keys) / heads;
    const int head = static_cast<int>((is_key ? n : n - keys) % heads);
    const int batch = static_cast<int>(row / rows), i = static_cast<int>(row % rows);
    is_key ? add_key<T, Cache>(p, batch, i, head) : turn_query<T>(p, batch, i, head);
  }
}

template <class T, class Cache>
void launch_as(const AppendParams& p, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const std::int64_t heads =
      std::int64_t{p.batch} * (std::int64_t{p.added} * p.num_heads_kv + std::int64_t{p.queries} * p.num_heads);
  if (heads == 0) return;
  const std::int64_t blocks = std::min((heads * kWarp + kThreads - 1) / kThreads, kMostBlocks);
  launch("launching the kernel that appends to a cache", kv_append_kernel<T, Cache>,
         dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, p);
}

}  // namespace

void launch_kv_append(const AppendParams& p, void* stream) {
  device_limits(p.device.index);  // says so where this build has no code for the device
  const DeviceGuard guard(p.device.index);
  const auto on = static_cast<cudaStream_t>(stream);
  const bool fp8 = p.dtype_cache == DType::kFloat8E4M3;
  using Bf16 = cutlass::bfloat16_t;
  using Fp16 = cutlass::half_t;
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_as<float, float>(p, on);
    case DType::kBFloat16:
      return fp8 ? launch_as<Bf16, Fp8>(p, on) : launch_as<Bf16, Bf16>(p, on);
    default:
      return fp8 ? launch_as<Fp16, Fp8>(p, on) : launch_as<Fp16, Fp16>(p, on);
  }
}

}  // namespace flashsdk::cuda
