// Rows of packed tensors behind the last sequence: written as those of queries that see no key.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/host/launch.h"

namespace flashsdk::cuda {

// A tensor and where its sequences end.
struct PackedTail {
  TensorParam tensor;
  const std::int32_t* end;  // first row behind the last sequence
  int total, heads, columns;
};

template <int kTensors>
struct PackedTails {
  PackedTail of[kTensors];
};

// One warp a row and head. lse (heads, total) may be null; it gets −inf.
inline constexpr int kPackedTailThreads = 128;
template <class Element, int kTensors>
__global__ void packed_tail_kernel(const __grid_constant__ PackedTails<kTensors> tails, RowParam lse) {
  const PackedTail& t = tails.of[blockIdx.y];
  const int warp = (blockIdx.x * kPackedTailThreads + threadIdx.x) / 32, warps = gridDim.x * kPackedTailThreads / 32;
  const int begin = *t.end;
  const std::int64_t count = std::int64_t{t.total - begin} * t.heads;
  for (std::int64_t i = warp; i < count; i += warps) {
    const std::int64_t row = begin + i / t.heads, head = i % t.heads;
    auto* target = static_cast<Element*>(t.tensor.ptr) + row * t.tensor.row + head * t.tensor.head;
    for (int c = threadIdx.x % 32; c < t.columns; c += 32) target[c] = Element(0.f);
    if (lse.ptr != nullptr && threadIdx.x % 32 == 0) lse.ptr[head * lse.head + row * lse.row] = -INFINITY;
  }
}

// Few blocks: there is rarely anything to write, and only the device knows.
template <class Element, int kTensors>
void clear_packed_tails(const PackedTails<kTensors>& tails, const RowParam& lse, cudaStream_t stream) {
  launch("launching the kernel for rows behind the last sequence", packed_tail_kernel<Element, kTensors>,
         dim3(16, kTensors), kPackedTailThreads, 0, stream, tails, lse);
}

// What a forward and a backward write besides, when sequences are packed.
template <class Element>
void clear_out_tail(const ForwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q == nullptr) return;
  const PackedTails<1> out{{{p.out, p.cu_seqlens_q + p.batch, p.total_q, p.num_heads, p.head_dim_v}}};
  clear_packed_tails<Element>(out, p.lse, stream);
}
template <class Element>
void clear_gradient_tails(const BackwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q == nullptr) return;
  const std::int32_t *end_q = p.cu_seqlens_q + p.batch, *end_k = p.cu_seqlens_k + p.batch;
  const PackedTails<3> gradients{{{p.dq, end_q, p.total_q, p.num_heads, p.head_dim},
                                  {p.dk, end_k, p.total_k, p.num_heads_kv, p.head_dim},
                                  {p.dv, end_k, p.total_k, p.num_heads_kv, p.head_dim_v}}};
  clear_packed_tails<Element>(gradients, {}, stream);
}

}  // namespace flashsdk::cuda
