// The backward of heads wider than 256. As in sm80/backward.h a thread block computes some rows of dK and dV of one key
// head, and adds to dQ. What registers hold of dK and dV is few keys, and the scores of these with a tile of queries
// are too few products for all warps. So some warps compute Sᵀ and as many others dPᵀ. They tell each other, and each
// turns both into Pᵀ and dSᵀ by itself. The products that follow are wide: the warps share out their columns.
#pragma once

#include "sm80/backward.h"

namespace flashsdk::sm80 {

// Adds dS·K to a tile of dQ (without the softmax scale), kPiece columns at a time. ds (queries, keys).
template <class Traits, class FragmentA>
__device__ void add_dq(FragmentA& ds, typename Traits::Element* smem_k, float* target, int columns) {
  typename Traits::MmaQueries mma;
  constexpr int kPiece = Traits::kPiece;
#pragma unroll 1
  for (int first = 0; first < columns; first += kPiece) {
    auto acc = cute::partition_fragment_C(mma, Shape<Int<Traits::kBlockM>, Int<kPiece>>{});
    cute::clear(acc);
    gemm_by_pieces<kPiece, Traits::kBlockN>(mma, acc, ds, smem_k + first * Traits::kBlockN, kPiece);
    cuda::add_to_dq_accum<Traits::kThreads, decltype(cute::size(acc))::value>(target + first * Traits::kBlockM,
                                                                              acc.data(), threadIdx.x);
  }
}

// All of an operand A.
template <class Order, class Mma, class SmemTensor>
__device__ auto fetched_operand_a(Mma mma, const SmemTensor& smem, Order order) {
  auto operand = operand_a(mma, smem, order);
  CUTE_UNROLL
  for (int k = 0; k < cute::size<2>(operand.fragment); ++k) operand.fetch(k);
  return operand.fragment;
}

// One function, as backward_kernel and for the same reason.
template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    wide_backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ cuda::BackwardWorkspace ws,
                         const __grid_constant__ cuda::BackwardSchedule schedule) {
  static_assert(kFeatures == cuda::Features::kNone || kFeatures == cuda::Features::kAll, "others have no code here");
  using Element = typename Traits::Element;
  using SmemQ = typename Traits::SmemQ;
  using SmemKV = typename Traits::SmemKV;
  using SmemScores = typename Traits::SmemScores;
  using Rows = typename Traits::Rows;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages, kScoreThreads = Traits::kScoreThreads;
  using QIo = TileIo<Element, kBlockM, kHeadDim, kThreads, Traits::kAnyAlignment>;

  const cuda::TileWork work = schedule.work(blockIdx.x);  // head: of keys
  const SeqlenInfo seq(p, work.batch);
  const int n0 = work.block * kBlockN;
  if (n0 >= seq.seqlen_k) return;
  const int thread = threadIdx.x, score_thread = thread % kScoreThreads, copy = thread / kScoreThreads;

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Element* smem_k = reinterpret_cast<Element*>(smem_bytes);
  Element* smem_v = smem_k + SmemKV::kElements;
  Element* smem_q = smem_v + SmemKV::kElements;            // kStages
  Element* smem_do = smem_q + kStages * SmemQ::kElements;  // kStages
  Element* smem_ds = smem_do + kStages * SmemQ::kElements;
  Element* smem_p = smem_ds + SmemScores::kElements;
  auto* smem_exchange = reinterpret_cast<float4*>(smem_p + SmemScores::kElements);  // (S or dP, atoms, score threads)
  auto* smem_rows = reinterpret_cast<Rows*>(reinterpret_cast<unsigned char*>(smem_exchange) + Traits::kExchangeBytes);

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
        ws, [&] { return ws.tile<kBlockM>(p, seq, work.batch, item.head, item.tile.index); }, smem_rows + stage);
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
  const auto at = matrix_coordinates<kBlockN, kBlockM>(mma_scores, score_thread);  // (key, query)
  auto acc_dk = cute::partition_fragment_C(mma_keys, Shape<Int<kBlockN>, Int<kHeadDim>>{});
  auto acc_dv = cute::partition_fragment_C(mma_keys, Shape<Int<kBlockN>, Int<kHeadDim>>{});
  cute::clear(acc_dk);
  cute::clear(acc_dv);

  for (int stage = 0; more; stage ^= kStages - 1) {
    typename Stream::Item next;
    const bool has_next = stream.next(next);
    cute::cp_async_wait<0>();
    __syncthreads();  // this tile has arrived for all; another stage, dS and P are free
    if constexpr (kStages == 2) {
      if (has_next) load_queries(next, stage ^ 1);
      cute::cp_async_fence();
    }
    Element* q = smem_q + stage * SmemQ::kElements;
    Element* dout = smem_do + stage * SmemQ::kElements;
    const Rows& rows = smem_rows[stage];
    const auto lse_log2 = cuda::rows_of_queries(rows.lse.lse_log2, at);
    const auto minus_delta = cuda::rows_of_queries(rows.minus_delta, at);
    const cuda::TopOfTile top(rows.lse.top);
    cuda::branch_if(top.marked(), [&] {
      clear_blind_queries<Traits>(row_major<SmemQ>(q), row_major<SmemQ>(dout), rows.lse.lse_log2);
    });

    auto acc_s = cute::partition_fragment_C(mma_scores, Shape<Int<kBlockN>, Int<kBlockM>>{});
    auto acc_dp = cute::make_tensor_like(acc_s);
    constexpr int kAtoms = decltype(cute::size(acc_s))::value / 4;
    if (copy < 2) {
      const bool of_s = copy == 0;
      cute::clear(acc_s);
      gemm_by_slabs<kBlockN, kBlockM>(mma_scores, acc_s, of_s ? smem_k : smem_v, of_s ? q : dout,
                                      of_s ? p.head_dim : p.head_dim_v, score_thread);
      write_atoms<kScoreThreads>(acc_s, smem_exchange + copy * kAtoms * kScoreThreads, score_thread);
    }
    __syncthreads();
    read_atoms<kScoreThreads>(acc_s, smem_exchange, score_thread);
    read_atoms<kScoreThreads>(acc_dp, smem_exchange + kAtoms * kScoreThreads, score_thread);

    auto probabilities = cute::make_tensor<Element>(acc_s.layout());  // that weigh dO
    if constexpr (cuda::has_softcap(kFeatures)) {
      const auto kept = scores.featured(as_matrix(acc_s), as_matrix(acc_dp), at, item.head, item.tile, lse_log2,
                                        minus_delta, top, cuda::NoBiasTile());
      probabilities = convert<Element>(acc_s);
      cuda::branch_if(p.score.dropout.threshold > 0, [&] { cuda::drop_pairs(probabilities, kept); });
    } else {
      scores.probabilities(as_matrix(acc_s), at, item.head, item.tile, lse_log2, top, scores.alibi(item.head));
      scores.gradients(probabilities, as_matrix(acc_s), as_matrix(acc_dp), at, item.head, item.tile, minus_delta);
    }
    if (copy == 0)
      store_accumulator(mma_scores, convert<Element>(acc_dp), row_major<SmemScores>(smem_ds), score_thread);
    else if (copy == 1)
      store_accumulator(mma_scores, probabilities, row_major<SmemScores>(smem_p), score_thread);
    __syncthreads();  // dS and P are complete

    {
      auto p_operand = fetched_operand_a(mma_keys, row_major<SmemScores>(smem_p), SumContiguous{});
      gemm_by_pieces<Traits::kPiece, kBlockM>(mma_keys, acc_dv, p_operand, dout, p.head_dim_v);
      auto ds_operand = fetched_operand_a(mma_keys, row_major<SmemScores>(smem_ds), SumContiguous{});
      gemm_by_pieces<Traits::kPiece, kBlockM>(mma_keys, acc_dk, ds_operand, q, p.head_dim);
    }
    if constexpr (kStages == 1) {
      __syncthreads();  // Q's and dO's places are free
      if (has_next) load_queries(next, 0);
      cute::cp_async_fence();
    }
    auto ds_operand = fetched_operand_a(mma_queries, transposed<SmemScores>(smem_ds), SumStrided{});
    accumulate_dq<Traits, Policy>(p, seq, ws, work.batch, stream, item,
                                  [&](float* target) { add_dq<Traits>(ds_operand, smem_k, target, p.head_dim); });

    item = next;
    more = has_next;
  }

  const float dropout_scale = cuda::has_dropout(kFeatures) ? p.score.dropout.scale() : 1.f;
  store_key_gradients<Traits>(p, seq, work, acc_dk, acc_dv, dropout_scale, smem_k, smem_v);
}

}  // namespace flashsdk::sm80
