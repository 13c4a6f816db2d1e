// The small kernels around the backward: delta before it, the conversion of dq after it.
#pragma once

#include "common/params.h"
#include "cuda/host/launch.h"
#include "cuda/pass/backward_workspace.h"
#include "cuda/tile/math.h"
#include "cuda/tile/vector_io.h"

namespace flashsdk::cuda {

// The sequence that a place (common/packed_tiles.h) belongs to, found by a warp; the first one for places ahead of all.
// batch at least 1.
template <int kTileRows>
__device__ __forceinline__ int sequence_at(const std::int32_t* cu_seqlens, int batch, int place) {
  int first = 0;
  for (int count = batch; count > 1;) {
    const int step = ceil_div(count, 32), ahead = threadIdx.x % 32 * step;
    const bool begun = ahead < count && first_packed_tile(cu_seqlens[first + ahead], kTileRows, first + ahead) <= place;
    const int before = max_of(__popc(__ballot_sync(0xffffffffu, begun)) - 1, 0) * step;
    first += before;
    count = min_of(step, count - before);
  }
  return first;
}

// A thread block for each query tile of each head and sequence; of packed sequences, for each place and head: where
// lengths differ, most tiles that the longest has lie behind the end of the others. Where there are more of these than
// a grid's dimensions take, a block does several. Never empty, as a launch may not be: rows of packed tensors need no
// sequence.
inline dim3 query_tile_grid(const ForwardParams& p, int tile_rows) {
  constexpr int kMost = 65535;
  const bool packed = p.packed();
  const int tiles = packed ? first_packed_tile(p.total_q, tile_rows, p.batch) : ceil_div(p.seqlen_q, tile_rows);
  const int heads = packed ? p.num_heads : p.num_heads * p.batch;
  return dim3(static_cast<unsigned>(max_of(1, tiles)),
              static_cast<unsigned>(max_of(1, min_of(heads, kMost))));  // no third: see branch_if()
}
// kPacked: of packed sequences, here and in all kernels. In batched calls heads come in reverse: the main kernel
// begins with the first heads, whose dq_accum the first pass has then just cleared, and ends with the last ones,
// which the last pass then finds in L2: 0 to 2 % of a call (benchmarks/results/sm90_backward_order.csv, run 43).
template <bool kPacked, int kTileRows, class Body>
__device__ void for_each_query_tile(const ForwardParams& p, Body&& body) {
  if constexpr (kPacked) {
    if (p.batch == 0) return;
    for (int head = blockIdx.y; head < p.num_heads; head += gridDim.y) {
      const int batch = sequence_at<kTileRows>(p.cu_seqlens_q, p.batch, blockIdx.x);
      const int first = first_packed_tile(p.cu_seqlens_q[batch], kTileRows, batch);
      if (static_cast<int>(blockIdx.x) < first) return;  // a place ahead of the sequences of a part (batch_parts.h)
      body(static_cast<int>(blockIdx.x) - first, head, batch);
    }
  } else {
    for (int i = p.num_heads * p.batch - 1 - static_cast<int>(blockIdx.y); i >= 0; i -= gridDim.y)
      body(static_cast<int>(blockIdx.x), i % p.num_heads, i / p.num_heads);
  }
}

// P = exp(score − lse) takes over the rounding of the lse, up to here less than 1e-4 of P. Beyond, the row's sum is
// taken anew: at 1e9 the lse no longer tells one key from twenty.
inline constexpr float kMaxTrustedLse = 1024.f;
__device__ __forceinline__ bool trusted(float lse) { return !(fabsf(lse) > kMaxTrustedLse) || lse == -INFINITY; }
// Stands in lse_log2 of such rows until then: no other row that sees a key has it.
inline constexpr float kTakenAnew = -INFINITY;

// Of several rows at once, so that their loads are under way together: this lane's part of the sum of dout∘out.
template <bool kVectors, int kLanes, int kRows, class Element>
__device__ __forceinline__ void add_row_products(const BackwardParams& p, const Element* out, const Element* dout,
                                                 const int (&rows)[kRows], float (&sums)[kRows]) {
  constexpr int kVector = kVectorElements;
  for (int c = threadIdx.x % kLanes * kVector; c < p.head_dim_v; c += kLanes * kVector) {
    const auto load = [&](const Element* from) {
      return kVectors ? load_once(from) : gather_vector(from, p.head_dim_v - c);
    };
    uint4 a[kRows], b[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      a[i] = load(out + rows[i] * p.out.row + c);
      b[i] = load(dout + rows[i] * p.dout.row + c);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Element *x = reinterpret_cast<const Element*>(&a[i]), *y = reinterpret_cast<const Element*>(&b[i]);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[i] = fmaf(static_cast<float>(x[e]), static_cast<float>(y[e]), sums[i]);
    }
  }
}

template <class Element>
__device__ __noinline__ bool all_zeros(const Element* row, int columns) {
  for (int c = 0; c < columns; ++c) {
    if (static_cast<float>(row[c]) != 0.f) return false;
  }
  return true;
}

// What a query adds to dsink: exp(sink − lse)·(−delta). One that sees no key has out 0, and all of the sum is the sink.
__device__ __forceinline__ float sink_term(float sink, float lse, float minus_delta) {
  return exp2_approx((sink - lse) * kLog2e) * minus_delta;
}

// delta = rowsum(dout∘out) − dlse and lse in units of log2, for one tile of queries. kVectors: rows of out and dout are
// known to be vector_rows(); kClears: clears the tile's part of dq_accum, as a deterministic call always does. Eight
// lanes a row. Returns whether the sum of some row is to be taken anew.
template <class Element, int kThreads, int kTileRows, bool kVectors, bool kClears>
__device__ bool prepare_tile(const BackwardParams& p, const BackwardWorkspace& ws, int m_block, int head, int batch) {
  constexpr int kLanes = 8, kStep = kThreads / kLanes, kRows = kTileRows > kStep ? 2 : 1;
  const SeqlenInfo seq(p, batch);
  const int m0 = m_block * ws.tile_rows;
  if (m0 >= seq.seqlen_q) return false;
  const std::int64_t tile = ws.tile<kTileRows>(p, seq, batch, head, m_block);

  const Element* out = seq.head_q<const Element>(p.out, batch, head);
  const Element* dout = seq.head_q<const Element>(p.dout, batch, head);
  const float* lse = seq.rows(p.lse, batch, head);
  const bool vectors =
      kVectors || (vector_rows(out, p.out.row, p.head_dim_v) && vector_rows(dout, p.dout.row, p.head_dim_v));
  LseTile<kTileRows>& of_tile = ws.lse_of<kTileRows>(tile);
  // The lse of a row that sees no key.
  const bool has_sink = p.sink.ptr != nullptr;
  const float unseen = has_sink ? *p.sink.of(head, 0) : -INFINITY;
  const bool huge_scale = fabsf(p.score.softmax_scale) >= kScaleLimit;
  bool blind = false, any_anew = false;
  for (int first = threadIdx.x / kLanes; first < ws.tile_rows; first += kRows * kStep) {
    int rows[kRows];
    float sums[kRows] = {}, row_lse[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = min_of(m0 + first + i * kStep, seq.seqlen_q - 1);  // of rows behind the end nothing is used
      row_lse[i] = lse[rows[i] * p.lse.row];
    }
    if (vectors)
      add_row_products<true, kLanes>(p, out, dout, rows, sums);
    else
      add_row_products<false, kLanes>(p, out, dout, rows, sums);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
      const int r = first + i * kStep;
      if (threadIdx.x % kLanes != 0 || r >= ws.tile_rows) continue;
      const bool valid = m0 + r < seq.seqlen_q;
      // A row that sees nothing has the lse −inf or, with a sink, the sink's and an out of zeros. Its dout may hold
      // anything. With a sink a row looks the same whose keys weigh less than a rounding of it and are dropped, have
      // values of 0, or give an out that rounds to 0. Its lse has a gradient: with dlse its sum tells. Without dlse it
      // may lose a dv of such weights (docs/numerics.md).
      const bool looks_blind =
          row_lse[i] == unseen && (!has_sink || all_zeros(out + rows[i] * p.out.row, p.head_dim_v));
      const bool in_doubt = looks_blind && has_sink && (p.dlse.ptr != nullptr || !trusted(unseen));
      const bool anew = valid && (in_doubt || !trusted(row_lse[i]));
      // To a row that sees nothing, lse +inf gives probabilities of zero.
      const bool sees = valid && (!looks_blind || in_doubt);
      of_tile.lse_log2[r] = anew ? kTakenAnew : sees ? row_lse[i] * kLog2e : INFINITY;
      const float dlse = valid && p.dlse.ptr != nullptr ? seq.rows(p.dlse, batch, head)[rows[i] * p.dlse.row] : 0.f;
      const std::int64_t place = tile * ws.tile_rows + r;
      const float minus_delta = !sees ? 0.f : in_doubt ? dlse : dlse - sums[i];
      ws.minus_delta[place] = minus_delta;
      if (ws.sink_terms != nullptr)
        ws.sink_terms[place] = in_doubt || !sees ? minus_delta : sink_term(unseen, row_lse[i], minus_delta);
      blind |= !sees && valid;  // rows behind the end are zeros wherever they are read
      any_anew |= anew;
    }
  }

  if (kClears || p.deterministic) {
    const std::int64_t tile_size = std::int64_t{ws.tile_rows} * ws.head_dim;
    float4* accum = reinterpret_cast<float4*>(ws.dq_accum + tile * tile_size);
    for (int i = threadIdx.x; i < tile_size / 4; i += kThreads) accum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (threadIdx.x < ws.parts) ws.dq_order[tile * ws.parts + threadIdx.x] = 0;

  const bool marked = __syncthreads_or(blind || any_anew || huge_scale) != 0;
  float* top = ws.top + tile * ws.tile_rows;
  if (threadIdx.x == 0) of_tile.top = marked ? top : nullptr;
  if (!marked) return false;
  for (int r = threadIdx.x; r < ws.tile_rows; r += kThreads) top[r] = of_tile.lse_log2[r] == INFINITY ? INFINITY : 0.f;
  return __syncthreads_or(any_anew) != 0;
}

// Grid: query_tile_grid(). RowSums: see cuda/pass/row_sums.h; a loop of their own, so that what they need is not kept
// around the rows of every tile.
template <class Element, int kThreads, bool kVectors, bool kClears, bool kPacked, class RowSums>
__global__ void __launch_bounds__(kThreads, 5)  // what row sums need beyond these registers, others need not pay for
    backward_prepare_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ BackwardWorkspace ws) {
  allow_next_kernel();
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *ws.next_work = 0;
  bool any_anew = false;
  for_each_query_tile<kPacked, RowSums::kTileRows>(p, [&](int m_block, int head, int batch) {
    any_anew |= prepare_tile<Element, kThreads, RowSums::kTileRows, kVectors, kClears>(p, ws, m_block, head, batch);
  });
  if (!any_anew) return;
  for_each_query_tile<kPacked, RowSums::kTileRows>(p, [&](int m_block, int head, int batch) {
    const SeqlenInfo seq(p, batch);
    RowSums::template take<kThreads>(p, ws, seq, m_block, head, batch);
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
