// Rows of tensors that no sequence has: behind the last of packed ones, and behind used lengths. Written as those of
// queries that see no key, and of keys that no query sees. (On a CPU: cpp/src/unused_rows.cpp.)
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/host/launch.h"

namespace flashsdk::cuda {

// Where the rows of one side, queries or keys, end. Both null: all rows are used.
struct RowEnds {
  const std::int32_t *cu_seqlens, *seqused;
  int batch, total;

  bool any() const { return cu_seqlens != nullptr || seqused != nullptr; }
  // In one of parts(): packed tensors are one.
  FLASHSDK_HD int parts() const { return cu_seqlens != nullptr ? 1 : batch; }
  FLASHSDK_HD int first_unused(int part) const {
    return cu_seqlens != nullptr ? cu_seqlens[batch] : seqused != nullptr ? seqused[part] : total;
  }
};
inline RowEnds ends_of_queries(const ForwardParams& p) { return {p.cu_seqlens_q, p.seqused_q, p.batch, p.total_q}; }
inline RowEnds ends_of_keys(const ForwardParams& p) { return {p.cu_seqlens_k, p.seqused_k, p.batch, p.total_k}; }

struct UnusedRows {
  TensorParam tensor;
  RowEnds ends;
  int heads, columns;
};
template <int kTensors>
struct UnusedRowsOf {
  UnusedRows of[kTensors];
};

// One warp a row and head. lse may be null; it gets −inf. Grid: (any, tensors · slices), each slice with every so many
// of the parts.
inline constexpr int kUnusedRowsThreads = 128;
template <class Element, int kTensors>
__global__ void unused_rows_kernel(const __grid_constant__ UnusedRowsOf<kTensors> tensors, RowParam lse) {
  const UnusedRows& t = tensors.of[blockIdx.y % kTensors];
  const int warp = (blockIdx.x * kUnusedRowsThreads + threadIdx.x) / 32, warps = gridDim.x * kUnusedRowsThreads / 32;
  const int slices = gridDim.y / kTensors;
  for (int part = blockIdx.y / kTensors; part < t.ends.parts(); part += slices) {
    const int begin = t.ends.first_unused(part);
    const std::int64_t count = std::int64_t{t.ends.total - begin} * t.heads;
    for (std::int64_t i = warp; i < count; i += warps) {
      const std::int64_t row = begin + i / t.heads, head = i % t.heads;
      auto* target =
          static_cast<Element*>(t.tensor.ptr) + part * t.tensor.batch + row * t.tensor.row + head * t.tensor.head;
      for (int c = threadIdx.x % 32; c < t.columns; c += 32) target[c] = Element(0.f);
      if (lse.ptr != nullptr && threadIdx.x % 32 == 0)
        lse.ptr[part * lse.batch + head * lse.head + row * lse.row] = -INFINITY;
    }
  }
}

// Few blocks: there is rarely much to write, and only the device knows.
template <class Element, int kTensors>
void clear_unused_rows(const UnusedRowsOf<kTensors>& tensors, const RowParam& lse, int parts, cudaStream_t stream) {
  constexpr int kBlocks = 16, kMostSlices = 256;
  const int slices = max_of(1, min_of(parts, kMostSlices));
  launch("launching the kernel for rows that no sequence has", unused_rows_kernel<Element, kTensors>,
         dim3(static_cast<unsigned>(max_of(1, kBlocks / slices)), static_cast<unsigned>(kTensors * slices)),
         kUnusedRowsThreads, 0, stream, tensors, lse);
}

// What a forward and a backward write besides.
template <class Element>
void clear_unused_rows(const ForwardParams& p, cudaStream_t stream) {
  const RowEnds queries = ends_of_queries(p);
  if (!queries.any()) return;
  const UnusedRowsOf<1> out{{{p.out, queries, p.num_heads, p.head_dim_v}}};
  clear_unused_rows<Element>(out, p.lse, queries.parts(), stream);
}
template <class Element>
void clear_unused_rows(const BackwardParams& p, cudaStream_t stream) {
  const RowEnds queries = ends_of_queries(p), keys = ends_of_keys(p);
  if (!queries.any() && !keys.any()) return;
  const UnusedRowsOf<3> gradients{{{p.dq, queries, p.num_heads, p.head_dim},
                                   {p.dk, keys, p.num_heads_kv, p.head_dim},
                                   {p.dv, keys, p.num_heads_kv, p.head_dim_v}}};
  clear_unused_rows<Element>(gradients, {}, queries.parts(), stream);
}

}  // namespace flashsdk::cuda
