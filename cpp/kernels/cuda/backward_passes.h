// The small kernels around the backward: delta before it, the conversion of dq after it.
#pragma once

#include "common/params.h"
#include "cuda/backward_workspace.h"
#include "cuda/math.h"
#include "cuda/vector_io.h"

namespace flashsdk::cuda {

// A thread block for each query tile of each head and sequence; where there are more of these than a grid's dimensions
// take, a block does several. Never empty, as a launch may not be: rows of packed tensors need no sequence.
inline dim3 query_tile_grid(const ForwardParams& p, int tile_rows) {
  constexpr int kMost = 65535;
  return dim3(static_cast<unsigned>(max_of(1, ceil_div(p.seqlen_q, tile_rows))),
              static_cast<unsigned>(max_of(1, min_of(p.num_heads * p.batch, kMost))));  // no third: see branch_if()
}
template <class Body>
__device__ void for_each_query_tile(const ForwardParams& p, Body&& body) {
  for (int i = blockIdx.y; i < p.num_heads * p.batch; i += gridDim.y)
    body(static_cast<int>(blockIdx.x), i % p.num_heads, i / p.num_heads);
}

// P = exp(score − lse) takes over the rounding of the lse, up to here less than 1e-4 of P. Beyond, the row's sum is taken
// anew: at 1e9 the lse no longer tells one key from twenty.
inline constexpr float kMaxTrustedLse = 1024.f;
__device__ __forceinline__ bool trusted(float lse) { return !(fabsf(lse) > kMaxTrustedLse) || lse == -INFINITY; }

// delta = rowsum(dout∘out) − dlse and lse in units of log2, for one tile of queries; clears its part of dq_accum.
// Eight lanes a row. RowSums: see cuda/row_sums.h.
template <class Element, int kThreads, class RowSums>
__device__ void prepare_tile(const BackwardParams& p, const BackwardWorkspace& ws, int m_block, int head, int batch) {
  constexpr int kLanesPerRow = 8, kVector = kVectorElements;
  const SeqlenInfo seq(p, batch);
  const int m0 = m_block * ws.tile_rows;
  if (m0 >= seq.seqlen_q) return;
  const std::int64_t tile = ws.tile(p, seq, batch, head, m_block);

  const Element* out = seq.head_q<const Element>(p.out, batch, head);
  const Element* dout = seq.head_q<const Element>(p.dout, batch, head);
  const float* lse = seq.rows(p.lse, batch, head);
  const bool vectors = vector_rows(out, p.out.row, p.head_dim_v) && vector_rows(dout, p.dout.row, p.head_dim_v);
  const int lane = threadIdx.x % kLanesPerRow;
  float* lse_log2 = ws.lse_of(tile);
  const bool huge_scale = fabsf(p.score.softmax_scale) >= kScaleLimit;
  bool blind = false, untrusted = false;
  for (int r = threadIdx.x / kLanesPerRow; r < ws.tile_rows; r += kThreads / kLanesPerRow) {
    const int row = m0 + r;
    const bool valid = row < seq.seqlen_q;
    float sum = 0.f;
    if (valid) {
      for (int c = lane * kVector; c < p.head_dim_v; c += kLanesPerRow * kVector) {
        const Element *from_out = out + row * p.out.row + c, *from_dout = dout + row * p.dout.row + c;
        uint4 a, b;
        if (vectors) {
          a = *reinterpret_cast<const uint4*>(from_out);
          b = *reinterpret_cast<const uint4*>(from_dout);
        } else {
          a = gather_vector(from_out, p.head_dim_v - c);
          b = gather_vector(from_dout, p.head_dim_v - c);
        }
        const Element* x = reinterpret_cast<const Element*>(&a);
        const Element* y = reinterpret_cast<const Element*>(&b);
#pragma unroll
        for (int e = 0; e < kVector; ++e) sum = fmaf(static_cast<float>(x[e]), static_cast<float>(y[e]), sum);
      }
    }
#pragma unroll
    for (int step = kLanesPerRow / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      const float row_lse = valid ? lse[row * p.lse.row] : -INFINITY;
      // A row that sees nothing has lse −inf; +inf makes its probabilities zero. Its out and dout may hold anything.
      const bool sees = row_lse != -INFINITY;
      lse_log2[r] = sees ? row_lse * kLog2e : INFINITY;
      if (sees && p.dlse.ptr != nullptr) sum -= seq.rows(p.dlse, batch, head)[row * p.dlse.row];
      ws.minus_delta[tile * ws.tile_rows + r] = sees ? -sum : 0.f;
      blind |= !sees && (valid || p.cu_seqlens_q != nullptr);  // packed: rows behind the end are another sequence's
      untrusted |= !trusted(row_lse);
    }
  }

  const std::int64_t tile_size = std::int64_t{ws.tile_rows} * ws.head_dim;
  float4* accum = reinterpret_cast<float4*>(ws.dq_accum + tile * tile_size);
  for (int i = threadIdx.x; i < tile_size / 4; i += kThreads) accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < ws.parts) ws.turn[tile * ws.parts + threadIdx.x] = 0;

  const bool marked = __syncthreads_or(blind || untrusted || huge_scale) != 0;
  float* top = ws.top + tile * ws.tile_rows;
  if (threadIdx.x == 0) mark_of(lse_log2, ws.tile_rows) = marked ? top : nullptr;
  if (!marked) return;
  for (int r = threadIdx.x; r < ws.tile_rows; r += kThreads) top[r] = lse_log2[r] == INFINITY ? INFINITY : 0.f;
  if (__syncthreads_or(untrusted)) RowSums::template take<kThreads>(p, seq, m_block, head, batch, top, lse_log2);
}

// Grid: query_tile_grid().
template <class Element, int kThreads, class RowSums>
__global__ void __launch_bounds__(kThreads, 5)  // what row sums need beyond these registers, others need not pay for
    backward_prepare_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace ws) {
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *ws.next_work = 0;
  for_each_query_tile(p, [&](int m_block, int head, int batch) {
    prepare_tile<Element, kThreads, RowSums>(p, ws, m_block, head, batch);
  });
}

// Where accumulator register e of a thread lies in its tile of dq_accum: neighbouring threads, neighbouring addresses.
template <int kThreads>
__device__ __forceinline__ int dq_accum_index(int e, int thread) {
#if __CUDA_ARCH__ >= 900
  return (e / 4 * kThreads + thread) * 4 + e % 4;  // four registers by one red.v4
#else
  return e * kThreads + thread;
#endif
}

// Adds a thread's accumulator to a tile of dq_accum.
template <int kThreads, int kElements>
__device__ __forceinline__ void add_to_dq_accum(float* tile, const float* acc, int thread) {
#pragma unroll
  for (int e = 0; e < kElements; e += 4) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + dq_accum_index<kThreads>(e, thread)),
        "f"(acc[e]), "f"(acc[e + 1]), "f"(acc[e + 2]), "f"(acc[e + 3])
        : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(tile + dq_accum_index<kThreads>(e + i, thread), acc[e + i]);
#endif
  }
}

}  // namespace flashsdk::cuda
