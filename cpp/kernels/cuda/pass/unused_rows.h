// Rows of tensors that no sequence has: behind the last of packed ones, and behind used lengths. Written as those of
// queries that see no key, and of keys that no query sees. (On a CPU: cpp/src/unused_rows.cpp.)
#pragma once

#include <cmath>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/seqlen_info.h"
#include "cuda/host/launch.h"

namespace flashsdk::cuda {

struct UnusedRows {
  TensorParam tensor;
  SequenceRows rows;
  int heads, columns;
};
template <int kTensors>
struct UnusedRowsOf {
  UnusedRows of[kTensors];
};

// One warp a row and head. lse may be null; it gets −inf. Grid: (any, tensors · slices), each slice with every so many
// of the batches.
inline constexpr int kUnusedRowsThreads = 128;
template <class Element, int kTensors>
__global__ void unused_rows_kernel(const __grid_constant__ UnusedRowsOf<kTensors> tensors, RowParam lse) {
  const UnusedRows& t = tensors.of[blockIdx.y % kTensors];
  const int warp = (blockIdx.x * kUnusedRowsThreads + threadIdx.x) / 32, warps = gridDim.x * kUnusedRowsThreads / 32;
  const int slices = gridDim.y / kTensors;
  for (int batch = blockIdx.y / kTensors; batch < t.rows.batches(); batch += slices) {
    const int begin = t.rows.first_unused(batch);
    const std::int64_t count = std::int64_t{t.rows.total - begin} * t.heads;
    for (std::int64_t i = warp; i < count; i += warps) {
      const std::int64_t row = begin + i / t.heads, head = i % t.heads;
      auto* target =
          static_cast<Element*>(t.tensor.ptr) + batch * t.tensor.batch + row * t.tensor.row + head * t.tensor.head;
      for (int c = threadIdx.x % 32; c < t.columns; c += 32) target[c] = Element(0.f);
      if (lse.ptr != nullptr && threadIdx.x % 32 == 0)
        lse.ptr[batch * lse.batch + head * lse.head + row * lse.row] = -INFINITY;
    }
  }
}

// Few blocks: there is rarely much to write, and only the device knows.
template <class Element, int kTensors>
void clear_unused_rows(const UnusedRowsOf<kTensors>& tensors, const RowParam& lse, int batches, cudaStream_t stream) {
  constexpr int kBlocks = 16, kMostSlices = 256;
  const int slices = max_of(1, min_of(batches, kMostSlices));
  launch("launching the kernel for rows that no sequence has", unused_rows_kernel<Element, kTensors>,
         dim3(static_cast<unsigned>(max_of(1, kBlocks / slices)), static_cast<unsigned>(kTensors * slices)),
         kUnusedRowsThreads, 0, stream, tensors, lse);
}

// What a forward and a backward write besides.
template <class Element>
void clear_unused_rows(const ForwardParams& p, cudaStream_t stream) {
  const SequenceRows queries = SequenceRows::of_queries(p);
  if (!queries.any_unused()) return;
  const UnusedRowsOf<1> out{{{p.out, queries, p.num_heads, p.head_dim_v}}};
  clear_unused_rows<Element>(out, p.lse, queries.batches(), stream);
}
template <class Element>
void clear_unused_rows(const BackwardParams& p, cudaStream_t stream) {
  const SequenceRows queries = SequenceRows::of_queries(p), keys = SequenceRows::of_keys(p);
  if (!queries.any_unused() && !keys.any_unused()) return;
  const UnusedRowsOf<3> gradients{{{p.dq, queries, p.num_heads, p.head_dim},
                                   {p.dk, keys, p.num_heads_kv, p.head_dim},
                                   {p.dv, keys, p.num_heads_kv, p.head_dim_v}}};
  clear_unused_rows<Element>(gradients, {}, queries.batches(), stream);
}

}  // namespace flashsdk::cuda
