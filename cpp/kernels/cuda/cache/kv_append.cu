#include "cuda/cache/kv_append.h"

#include <algorithm>
#include <cstdint>

#include <cutlass/numeric_types.h>

#include "cuda/host/launch.h"

namespace flashsdk::cuda {
namespace {

constexpr int kThreads = 128, kWarp = 32;

template <class T>
__device__ float cosine(const void* data, std::int64_t at, bool float32) {
  return float32 ? static_cast<const float*>(data)[at] : static_cast<float>(static_cast<const T*>(data)[at]);
}

// One head at a position, by a warp; `from` and `to` are other memory.
template <class T>
__device__ void rotate(const RotaryParam& r, int position, const T* from, int dim, T* to) {
  const int lane = threadIdx.x % kWarp;
  for (int n = lane; n < r.pairs; n += kWarp) {
    const float cos = cosine<T>(r.cos, position * r.cos_row + n, r.float32);
    const float sin = cosine<T>(r.sin, position * r.sin_row + n, r.float32);
    const float x = static_cast<float>(from[r.first(n)]), y = static_cast<float>(from[r.second(n)]);
    to[r.first(n)] = static_cast<T>(x * cos - y * sin);
    to[r.second(n)] = static_cast<T>(y * cos + x * sin);
  }
  for (int c = 2 * r.pairs + lane; c < dim; c += kWarp) to[c] = from[c];
}

template <class T>
__device__ void add_key(const AppendParams& p, int batch, int j, int head) {
  const int key = p.used[batch] + j;
  rotate(p.rotary, key, row_of<const T>(p.k, batch, j) + head * p.k.head, p.head_dim,
         p.cache<T>(p.k_cache, batch).at(key) + head * p.k_cache.head);
  const T* from = row_of<const T>(p.v, batch, j) + head * p.v.head;
  T* to = p.cache<T>(p.v_cache, batch).at(key) + head * p.v_cache.head;
  for (int c = threadIdx.x % kWarp; c < p.head_dim_v; c += kWarp) to[c] = from[c];
}

template <class T>
__device__ void turn_query(const AppendParams& p, int batch, int i, int head) {
  rotate(p.rotary, p.position_of_query(batch, i), row_of<const T>(p.q, batch, i) + head * p.q.head, p.head_dim,
         row_of<T>(p.q_out, batch, i) + head * p.q_out.head);
}

// A warp a head of a row, first those of keys.
template <class T>
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
    is_key ? add_key<T>(p, batch, i, head) : turn_query<T>(p, batch, i, head);
  }
}

template <class T>
void launch_as(const AppendParams& p, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;
  const std::int64_t heads =
      std::int64_t{p.batch} * (std::int64_t{p.added} * p.num_heads_kv + std::int64_t{p.queries} * p.num_heads);
  if (heads == 0) return;
  const std::int64_t blocks = std::min((heads * kWarp + kThreads - 1) / kThreads, kMostBlocks);
  launch("launching the kernel that appends to a cache", kv_append_kernel<T>, dim3(static_cast<unsigned>(blocks)),
         kThreads, 0, stream, p);
}

}  // namespace

void launch_kv_append(const AppendParams& p, void* stream) {
  device_limits(p.device.index);  // says so where this build has no code for the device
  const DeviceGuard guard(p.device.index);
  const auto on = static_cast<cudaStream_t>(stream);
  switch (p.dtype) {
    case DType::kFloat32:
      return launch_as<float>(p, on);
    case DType::kBFloat16:
      return launch_as<cutlass::bfloat16_t>(p, on);
    default:
      return launch_as<cutlass::half_t>(p, on);
  }
}

}  // namespace flashsdk::cuda
