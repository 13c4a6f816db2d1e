// The gradient of sinks: dsink = −Σ exp(sink − lse)·delta over the queries of a head. The first pass leaves the terms.
#pragma once

#include <cuda_runtime.h>

#include "common/params.h"
#include "cuda/host/launch.h"
#include "cuda/pass/backward_workspace.h"

namespace flashsdk::cuda {

// A thread block a head; of sequences, each is shared out to `each` threads. Always in the same order.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sink_gradient_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace ws,
                         int each) {
  const int head = blockIdx.x, thread = threadIdx.x;
  double sum = 0.;
  for (int batch = thread / each; batch < p.batch; batch += kThreads / each) {
    const SeqlenInfo seq(p, batch);
    const float* terms = ws.sink_terms + ws.tile(p, seq, batch, head, 0) * ws.tile_rows;
    for (int query = thread % each; query < seq.seqlen_q; query += each) sum += terms[query];
  }
  __shared__ double sums[kThreads];
  sums[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) p.dsink[head] += static_cast<float>(sums[0]);
}

// Once a call, ahead of what add_sink_gradient() adds for each part of the batch (cuda/host/batch_parts.h).
inline void clear_sink_gradient(const BackwardParams& p, cudaStream_t stream) {
  if (p.dsink == nullptr) return;
  check(cudaMemsetAsync(p.dsink, 0, static_cast<std::size_t>(p.num_heads) * sizeof(float), stream),
        "clearing the gradient of sinks");
}
inline void add_sink_gradient(const BackwardParams& p, const BackwardWorkspace& ws, cudaStream_t stream) {
  constexpr int kThreads = 512, kWarp = 32;
  if (p.dsink == nullptr) return;
  const int each = p.batch < kThreads / kWarp ? kThreads : kWarp;
  launch("launching the pass for the gradient of sinks", sink_gradient_kernel<kThreads>,
         dim3(static_cast<unsigned>(p.num_heads)), kThreads, 0, stream, p, ws, each);
}

}  // namespace flashsdk::cuda
