// The backward kernel: one thread block computes kBlockN rows of dK and dV of one key head, and adds to dQ.
//
// K and V stay, the tiles of queries that see them stream past, over all query heads of the group. Scores are computed
// transposed, Sᵀ = K·Qᵀ, so that Pᵀ and dSᵀ come out as operand A of dV += Pᵀ·dO and dK += dSᵀ·Q and need not leave
// the registers; dS goes through shared memory once, for dQ += dS·K, which is summed in fp32 in device memory.
#pragma once

#include "common/kernel_entry.h"
#include "cuda/pass/backward_passes.h"
#include "cuda/schedule/backward_stream.h"
#include "cuda/tile/backward_scores.h"
#include "cuda/tile/bias_tile.h"
#include "sm80/gemm.h"
#include "sm80/tile_io.h"

namespace flashsdk::sm80 {

template <class Traits, class Policy>
using QueryStream = cuda::QueryStream<Traits::kBlockM, Traits::kBlockN, Policy,
                                      Traits::kStaggered && std::is_same_v<Policy, DensePolicy>>;

template <class Traits, class Policy, cuda::Features kFeatures>
using BackwardScores = cuda::BackwardScores<Traits::kBlockM, Traits::kBlockN, Policy, kFeatures, Traits::kWholeCalls>;

// The bias of a tile comes to where its dS goes. (A place of its own would not fit beside the rest on every device.)
template <class Traits, cuda::Features kFeatures>
using BackwardBias = std::conditional_t<cuda::has_bias(kFeatures) && !Traits::kAnyAlignment,
                                        cuda::BiasTile<typename Traits::Element, Traits::kBlockM, Traits::kBlockN,
                                                       Traits::kThreads, 1, kFeatures == cuda::Features::kBias>,
                                        cuda::NoBiasTile>;

// Bytes of dS, P (unless it stays in registers) and the bias.
template <class Traits, cuda::Features kFeatures>
inline constexpr int kScoreBytes =
    max_of(static_cast<int>(sizeof(typename Traits::Element)) * Traits::kScoreBuffers * Traits::SmemScores::kElements,
           BackwardBias<Traits, kFeatures>::kBytes);

template <class Traits, cuda::Features kFeatures>
inline constexpr int kBackwardSmemBytes =
    Traits::kSmemBytes + kScoreBytes<Traits, kFeatures> - kScoreBytes<Traits, cuda::Features::kNone>;

// add(place) adds to a tile of dQ (without the softmax scale). In a deterministic call key tiles take turns.
template <class Traits, class Policy, class Add>
__device__ void accumulate_dq(const ForwardParams& p, const SeqlenInfo& seq, const cuda::BackwardWorkspace& ws,
                              int batch, const QueryStream<Traits, Policy>& stream,
                              const typename QueryStream<Traits, Policy>::Item& item, Add&& add) {
  const std::int64_t tile = ws.tile<Traits::kBlockM>(p, seq, batch, item.head, item.tile.index);
  float* target = ws.dq_accum + tile * (Traits::kBlockM * Traits::kHeadDim);
  if (p.deterministic) {
    if (threadIdx.x == 0) {
      const int mine = stream.turn(item);
      volatile int* taken = ws.dq_order + tile;
      while (*taken != mine) {
      }
      __threadfence();
    }
    __syncthreads();
  }
  add(target);
  if (p.deterministic) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      auto* const taken = static_cast<volatile int*>(ws.dq_order + tile);
      *taken = *taken + 1;
    }
  }
}

// In a marked tile, queries that see no key: whatever q and dO hold there counts as zeros. Rare, so that it may take
// time but no register: nothing of it is computed ahead of the loop over tiles.
template <class Traits, class SmemTensor>
__device__ void clear_blind_queries(const SmemTensor& q, const SmemTensor& dout, const float* lse_log2) {
  constexpr int kVectors = Traits::kHeadDim / cuda::kVectorElements;
#pragma unroll 1
  for (int i = cuda::opaque(static_cast<int>(threadIdx.x)); i < Traits::kBlockM * kVectors; i += Traits::kThreads) {
    const int row = i / kVectors, column = i % kVectors * cuda::kVectorElements;
    if (lse_log2[row] == INFINITY) {
      for (auto* to : {&q(row, column), &dout(row, column)}) *reinterpret_cast<uint4*>(to) = uint4{};
    }
  }
  __syncthreads();
}

// Starts the copy of lse and delta of a tile of queries: tile() is its index in the workspace.
template <class Traits, class Tile>
__device__ __forceinline__ void load_rows(const cuda::BackwardWorkspace& ws, Tile&& tile, typename Traits::Rows* rows) {
  using Vector = cute::uint128_t;
  using Rows = typename Traits::Rows;
  constexpr int kLseVectors = sizeof(Rows::lse) / sizeof(Vector), kVectors = sizeof(Rows) / sizeof(Vector);
  static_assert(kVectors <= Traits::kThreads);
  const int thread = threadIdx.x;
  if (thread >= kVectors) return;
  const std::int64_t index = tile();
  const auto* lse = reinterpret_cast<const Vector*>(&ws.lse_of<Traits::kBlockM>(index));
  const auto* minus_delta = reinterpret_cast<const Vector*>(ws.minus_delta + index * Traits::kBlockM);
  cute::SM80_CP_ASYNC_CACHEGLOBAL<Vector>::copy(thread < kLseVectors ? lse[thread] : minus_delta[thread - kLseVectors],
                                                reinterpret_cast<Vector*>(rows)[thread]);
}

template <class Traits>
using KeyTileIo =
    TileIo<typename Traits::Element, Traits::kBlockN, Traits::kHeadDim, Traits::kThreads, Traits::kAnyAlignment>;

// The prologue's part: starts the copy of the thread block's keys and values.
template <class Traits>
__device__ __forceinline__ void load_keys(const BackwardParams& p, const SeqlenInfo& seq, const cuda::TileWork& work,
                                          typename Traits::Element* smem_k, typename Traits::Element* smem_v) {
  using Element = typename Traits::Element;
  using SmemKV = typename Traits::SmemKV;
  const int n0 = work.block * Traits::kBlockN, rows = seq.seqlen_k - n0;
  KeyTileIo<Traits>(threadIdx.x, p.head_dim)
      .load(row_major<SmemKV>(smem_k), seq.head_k<const Element>(p.k, work.batch, work.head) + n0 * p.k.row, p.k.row,
            rows);
  KeyTileIo<Traits>(threadIdx.x, p.head_dim_v)
      .load(row_major<SmemKV>(smem_v), seq.head_k<const Element>(p.v, work.batch, work.head) + n0 * p.v.row, p.v.row,
            rows);
}

// The epilogue: dK and dV of the thread block's keys, by way of the places of K and V in shared memory.
template <class Traits, class Accumulator>
__device__ __forceinline__ void store_key_gradients(const BackwardParams& p, const SeqlenInfo& seq,
                                                    const cuda::TileWork& work, Accumulator& acc_dk,
                                                    Accumulator& acc_dv, float dropout_scale,
                                                    typename Traits::Element* smem_k,
                                                    typename Traits::Element* smem_v) {
  using Element = typename Traits::Element;
  using SmemKV = typename Traits::SmemKV;
  typename Traits::MmaKeys mma;
  for (int i = 0; i < cute::size(acc_dk); ++i) {
    acc_dk(i) *= p.score.softmax_scale;
    acc_dv(i) *= dropout_scale;
  }
  auto dk = convert<Element>(acc_dk);
  auto dv = convert<Element>(acc_dv);
  cute::cp_async_wait<0>();
  __syncthreads();  // K's and V's places are free
  store_accumulator(mma, dk, row_major<SmemKV>(smem_k));
  store_accumulator(mma, dv, row_major<SmemKV>(smem_v));
  __syncthreads();
  const int n0 = work.block * Traits::kBlockN, rows = seq.seqlen_k - n0;
  KeyTileIo<Traits>(threadIdx.x, p.head_dim)
      .store(row_major<SmemKV>(smem_k), seq.head_k<Element>(p.dk, work.batch, work.head) + n0 * p.dk.row, p.dk.row,
             rows);
  KeyTileIo<Traits>(threadIdx.x, p.head_dim_v)
      .store(row_major<SmemKV>(smem_v), seq.head_k<Element>(p.dv, work.batch, work.head) + n0 * p.dv.row, p.dv.row,
             rows);
}

// One function of 150 lines: its parts share fragments, whose layouts are types of this kernel alone, and registers are
// what it has least of, so that each part would take all of them as arguments.
template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ cuda::BackwardWorkspace ws,
                    const __grid_constant__ cuda::BackwardSchedule schedule) {
  using Element = typename Traits::Element;
  using SmemQ = typename Traits::SmemQ;
  using SmemKV = typename Traits::SmemKV;
  using SmemScores = typename Traits::SmemScores;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages;
  using Rows = typename Traits::Rows;
  // Under a band ptxas would keep more from tile to tile than there are registers (head_dim 64: 508 bytes spilled).
  constexpr int kKnownRows = std::is_same_v<Policy, BandPolicy> ? 0 : kBlockM;
  using QIo = TileIo<Element, kBlockM, kHeadDim, kThreads, Traits::kAnyAlignment>;

  const cuda::TileWork work = schedule.work(blockIdx.x);  // head: of keys
  const SeqlenInfo seq(p, work.batch);
  const int n0 = work.block * kBlockN;
  if (n0 >= seq.seqlen_k) return;
  const int thread = threadIdx.x;

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Element* smem_k = reinterpret_cast<Element*>(smem_bytes);
  Element* smem_v = smem_k + SmemKV::kElements;
  Element* smem_q = smem_v + SmemKV::kElements;            // kStages
  Element* smem_do = smem_q + kStages * SmemQ::kElements;  // kStages
  Element* smem_ds = smem_do + kStages * SmemQ::kElements;
  Element* smem_p = smem_ds + SmemScores::kElements;  // unless P stays in registers
  Rows* smem_rows =
      reinterpret_cast<Rows*>(reinterpret_cast<unsigned char*>(smem_ds) + kScoreBytes<Traits, kFeatures>);  // kStages
  using Stream = QueryStream<Traits, Policy>;
  Stream stream(p, seq, work);
  auto load_queries = [&](const typename Stream::Item& item, int stage) {
    const int m0 = item.tile.index * kBlockM, rows = seq.seqlen_q - m0;
    QIo(thread, p.head_dim)
        .load(row_major<SmemQ>(smem_q + stage * SmemQ::kElements),
              seq.head_q<const Element>(p.q, work.batch, item.head) + m0 * p.q.row, p.q.row, rows);
    QIo(thread, p.head_dim_v)
        .load(row_major<SmemQ>(smem_do + stage * SmemQ::kElements),
              seq.head_q<const Element>(p.dout, work.batch, item.head) + m0 * p.dout.row, p.dout.row, rows);
    load_rows<Traits>(
        ws, [&] { return ws.tile<kKnownRows>(p, seq, work.batch, item.head, item.tile.index); }, smem_rows + stage);
  };

  typename Stream::Item item;
  bool more = stream.next(item);
  if (more) {
    load_keys<Traits>(p, seq, work, smem_k, smem_v);
    load_queries(item, 0);
  }
  cute::cp_async_fence();

  typename Traits::MmaScores mma_scores;
  typename Traits::MmaKeys mma_keys;
  typename Traits::MmaQueries mma_queries;
  BackwardScores<Traits, Policy, kFeatures> scores(p, seq, work);
  auto acc_dk = cute::partition_fragment_C(mma_keys, Shape<Int<kBlockN>, Int<kHeadDim>>{});
  auto acc_dv = cute::partition_fragment_C(mma_keys, Shape<Int<kBlockN>, Int<kHeadDim>>{});
  cute::clear(acc_dk);
  cute::clear(acc_dv);

  for (int stage = 0; more; stage ^= 1) {
    typename Stream::Item next;
    const bool has_next = stream.next(next);
    cute::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived for all; the other stage and dS are free
    const BackwardBias<Traits, kFeatures> bias(p.score, seq, work.batch, item.head, smem_ds);
    bias.load(item.tile.index * kBlockM, n0);
    // A group of its own: needed before what follows.
    if constexpr (BackwardBias<Traits, kFeatures>::kBytes > 0) cute::cp_async_fence();
    if (has_next) load_queries(next, stage ^ 1);
    cute::cp_async_fence();
    Element* q = smem_q + stage * SmemQ::kElements;
    Element* dout = smem_do + stage * SmemQ::kElements;
    const auto at = matrix_coordinates<kBlockN, kBlockM>(mma_scores);  // (key, query)
    const Rows& rows = smem_rows[stage];
    const auto lse_log2 = cuda::rows_of_queries(rows.lse.lse_log2, at);
    const auto minus_delta = cuda::rows_of_queries(rows.minus_delta, at);
    const cuda::TopOfTile top(rows.lse.top);
    cuda::branch_if(top.marked(), [&] {
      clear_blind_queries<Traits>(row_major<SmemQ>(q), row_major<SmemQ>(dout), rows.lse.lse_log2);
    });

    auto acc_s = cute::partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});
    auto acc_dp = cute::partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});
    cute::clear(acc_s);
    cute::clear(acc_dp);
    gemm(mma_scores, acc_s, operand_a(mma_scores, row_major<SmemKV>(smem_k), SumContiguous{}),
         operand_b(mma_scores, row_major<SmemQ>(q), SumContiguous{}));
    const auto wait_for_bias = [&] {
      cuda::branch_if(bias.holds(), [] {
        cute::cp_async_wait<1>();
        __syncthreads();  // it has arrived for all
      });
    };
    if constexpr (kFeatures == cuda::Features::kBias) {
      wait_for_bias();
      scores.probabilities(as_matrix(acc_s), at, item.head, item.tile, lse_log2, top, bias);
      __syncthreads();  // the bias's place is free
    } else if constexpr (!cuda::modifies_scores(kFeatures)) {
      scores.probabilities(as_matrix(acc_s), at, item.head, item.tile, lse_log2, top, scores.alibi(item.head));
    }
    gemm(mma_scores, acc_dp, operand_a(mma_scores, row_major<SmemKV>(smem_v), SumContiguous{}),
         operand_b(mma_scores, row_major<SmemQ>(dout), SumContiguous{}));
    auto probabilities = cute::make_tensor<Element>(acc_s.layout());  // that weigh dO
    if constexpr (cuda::has_softcap(kFeatures)) {
      wait_for_bias();
      const auto kept = scores.featured(as_matrix(acc_s), as_matrix(acc_dp), at, item.head, item.tile, lse_log2,
                                        minus_delta, top, bias);
      cuda::branch_if(bias.holds(), [] { __syncthreads(); });  // its place is free
      probabilities = convert<Element>(acc_s);
      cuda::branch_if(p.score.dropout.threshold > 0, [&] { cuda::drop_pairs(probabilities, kept); });
    } else {
      scores.gradients(probabilities, as_matrix(acc_s), as_matrix(acc_dp), at, item.head, item.tile, minus_delta);
    }

    auto dout_t = transposed<SmemQ>(dout);  // (head_dim, queries)
    auto q_t = transposed<SmemQ>(q);
    auto ds = convert<Element>(acc_dp);
    store_accumulator(mma_scores, ds, row_major<SmemScores>(smem_ds));
    if constexpr (Traits::kRegisterOperands) {
      auto p_operand = as_operand_a(probabilities);
      auto ds_operand = as_operand_a(ds);
      gemm(mma_keys, acc_dv, RegisterOperand{p_operand}, operand_b(mma_keys, dout_t, SumStrided{}));
      __syncthreads();  // dS is complete
      gemm(mma_keys, acc_dk, RegisterOperand{ds_operand}, operand_b(mma_keys, q_t, SumStrided{}));
    } else {
      store_accumulator(mma_scores, probabilities, row_major<SmemScores>(smem_p));
      __syncthreads();
      gemm(mma_keys, acc_dv, operand_a(mma_keys, row_major<SmemScores>(smem_p), SumContiguous{}),
           operand_b(mma_keys, dout_t, SumStrided{}));
      gemm(mma_keys, acc_dk, operand_a(mma_keys, row_major<SmemScores>(smem_ds), SumContiguous{}),
           operand_b(mma_keys, q_t, SumStrided{}));
    }

    auto acc_dq = cute::partition_fragment_C(mma_queries, Shape<Int<kBlockM>, Int<kHeadDim>>{});
    cute::clear(acc_dq);
    gemm(mma_queries, acc_dq, operand_a(mma_queries, transposed<SmemScores>(smem_ds), SumStrided{}),
         operand_b(mma_queries, transposed<SmemKV>(smem_k), SumStrided{}));
    accumulate_dq<Traits, Policy>(p, seq, ws, work.batch, stream, item, [&](float* target) {
      cuda::add_to_dq_accum<kThreads, decltype(cute::size(acc_dq))::value>(target, acc_dq.data(), threadIdx.x);
    });

    item = next;
    more = has_next;
  }

  const float dropout_scale = cuda::has_dropout(kFeatures) ? p.score.dropout.scale() : 1.f;
  store_key_gradients<Traits>(p, seq, work, acc_dk, acc_dv, dropout_scale, smem_k, smem_v);
}

// dq_accum times the softmax scale, in 16 bits, to dq, for one tile of queries.
template <class Traits>
__device__ void convert_dq_tile(const BackwardParams& p, const cuda::BackwardWorkspace& ws, int m_block, int head,
                                int batch) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  const SeqlenInfo seq(p, batch);
  const int m0 = m_block * kBlockM;
  if (m0 >= seq.seqlen_q) return;

  typename Traits::MmaQueries mma;
  const float* tile = ws.dq_accum + ws.tile<kBlockM>(p, seq, batch, head, m_block) * (kBlockM * kHeadDim);
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto* smem = reinterpret_cast<Element*>(smem_bytes);
  const int columns = Traits::kPiece == kHeadDim ? kHeadDim : p.head_dim;
  for (int first = 0; first < columns; first += Traits::kPiece) {
    auto acc = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<Traits::kPiece>>{});
    CUTE_UNROLL
    for (int e = 0; e < cute::size(acc); ++e) {
      acc.data()[e] = tile[first * kBlockM + cuda::dq_accum_index<kThreads>(e, threadIdx.x)] * p.score.softmax_scale;
    }
    store_accumulator(mma, convert<Element>(acc), row_major<SmemTile<kBlockM, Traits::kPiece>>(smem + first * kBlockM));
  }
  __syncthreads();
  TileIo<Element, kBlockM, kHeadDim, kThreads, Traits::kAnyAlignment>(threadIdx.x, p.head_dim)
      .store(row_major<typename Traits::SmemOut>(smem), seq.head_q<Element>(p.dq, batch, head) + m0 * p.dq.row,
             p.dq.row, seq.seqlen_q - m0);
}

// Grid: cuda::query_tile_grid().
template <class Traits, bool kPacked>
__global__ void __launch_bounds__(Traits::kThreads)
    backward_convert_dq_kernel(const __grid_constant__ BackwardParams p,
                               const __grid_constant__ cuda::BackwardWorkspace ws) {
  cuda::for_each_query_tile<kPacked, Traits::kBlockM>(p, [&](int m_block, int head, int batch) {
    convert_dq_tile<Traits>(p, ws, m_block, head, batch);
    __syncthreads();  // shared memory is free for the next one
  });
}

}  // namespace flashsdk::sm80
