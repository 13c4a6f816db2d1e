// Rows of packed tensors behind the last sequence: written as those of queries that see no key.
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/launch.h"

namespace flashsdk::cuda {

// A tensor and where its sequences end.
struct PackedTail {
  TensorParam tensor;
  const std::int32_t* end;  // first row behind the last sequence
  int total, heads, columns;
};

// One warp a row and head. lse (heads, total) may be null; it gets −inf.
inline constexpr int kPackedTailThreads = 128;
template <class Element>
__global__ void packed_tail_kernel(PackedTail t, RowParam lse) {
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
template <class Element>
void clear_packed_tail(const PackedTail& t, const RowParam& lse, cudaStream_t stream) {
  launch("launching the kernel for rows behind the last sequence", packed_tail_kernel<Element>, dim3(16),
         kPackedTailThreads, 0, stream, t, lse);
}

// What a forward and a backward write besides, when sequences are packed.
template <class Element>
void clear_out_tail(const ForwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q == nullptr) return;
  clear_packed_tail<Element>({p.out, p.cu_seqlens_q + p.batch, p.total_q, p.num_heads, p.head_dim_v}, p.lse, stream);
}
template <class Element>
void clear_gradient_tails(const BackwardParams& p, cudaStream_t stream) {
  if (p.cu_seqlens_q == nullptr) return;
  clear_packed_tail<Element>({p.dq, p.cu_seqlens_q + p.batch, p.total_q, p.num_heads, p.head_dim}, {}, stream);
  clear_packed_tail<Element>({p.dk, p.cu_seqlens_k + p.batch, p.total_k, p.num_heads_kv, p.head_dim}, {}, stream);
  clear_packed_tail<Element>({p.dv, p.cu_seqlens_k + p.batch, p.total_k, p.num_heads_kv, p.head_dim_v}, {}, stream);
}

}  // namespace flashsdk::cuda
