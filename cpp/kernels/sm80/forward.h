// The forward kernel: one thread block computes kBlockM rows of the output of one head.
//
// Q stays in shared memory (or registers), tiles of K and V stream past it, and a running maximum and sum make the
// softmax exact without ever storing the scores (FlashAttention, arXiv 2205.14135; loop order of FlashAttention-2,
// arXiv 2307.08691).
#pragma once

#include "common/kernel_entry.h"
#include "cuda/host/launch.h"
#include "cuda/schedule/tile_scheduler.h"
#include "cuda/tile/bias_tile.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/masking.h"
#include "cuda/tile/score_stages.h"
#include "cuda/tile/softmax.h"
#include "sm80/column_warps.h"
#include "sm80/gemm.h"
#include "sm80/plan_parts.h"
#include "sm80/tile_io.h"

namespace flashsdk::sm80 {

// Of the scores of all parts of a call. kPolicyScore: a mask policy changes them, too.
template <cuda::Features kFeatures, bool kPolicyScore = false>
__device__ cuda::ScoreUnit score_unit(const ScoreParam& score) {
  return {score, kPolicyScore || (cuda::modifies_scores(kFeatures) && cuda::ScoreFeatures::any(score))};
}

// What out is multiplied by for the elements that dropout left out.
template <class Element, cuda::Features kFeatures>
__device__ float scale_of_out(const ScoreParam& score) {
  return cuda::has_dropout(kFeatures) ? cuda::scale_of_kept<Element>(score.dropout) : 1.f;
}

// A thread block sees all keys that its queries see: the other choice is KeySplit.
struct AllKeys {
  static constexpr bool kSplit = false;
  OwnRows shared;
};

// Of which sequence the thread block has which part of the keys. False: of none. smem: plan_smem_bytes().
__device__ inline bool take_part(const ForwardParams&, const AllKeys&, cuda::TileWork&, KeyPart&, void*) {
  return true;
}
__device__ inline bool take_part(const ForwardParams& p, const KeySplit& keys, cuda::TileWork& work, KeyPart& part,
                                 void* smem) {
  const int index = static_cast<int>(blockIdx.y);
  part = keys.planned ? planned_part(p, keys, index, static_cast<int*>(smem)) : keys.part(index, work.batch);
  work.batch = part.batch;
  return part.parts != 0;
}

__device__ inline TileWalk walk_of_part(const AllKeys&, const TileWalk& walk, const KeyPart&) { return walk; }
__device__ inline TileWalk walk_of_part(const KeySplit&, const TileWalk& walk, const KeyPart& part) {
  const TileWalk of_part = walk.part(part.index, part.parts);
  cuda::allow_next_kernel();
  return of_part;
}

// Behind K and V in shared memory. Few queries, whose keys are split, have little of a bias.
template <class Traits, cuda::Features kFeatures, class Keys>
using ForwardBias = std::conditional_t<cuda::has_bias(kFeatures) && !Keys::kSplit && !Traits::kAnyAlignment,
                                       cuda::BiasTile<typename Traits::Element, Traits::kBlockM, Traits::kBlockN,
                                                      Traits::kThreads, 1, kFeatures == cuda::Features::kBias>,
                                       cuda::NoBiasTile>;

// What products with fp8 keys are multiplied by; nothing of others.
template <bool kFp8Kv>
struct KeyDescale {
  __device__ KeyDescale(const ForwardParams&, int, int) {}
};
template <>
struct KeyDescale<true> {
  float factor;
  __device__ KeyDescale(const ForwardParams& p, int batch, int head_kv) : factor(p.k_descale.of(batch, head_kv)) {}
};

// What happens between the two products, for one tile of scores.
template <class Traits, class Policy, cuda::Features kFeatures, class Rows>
class ForwardScores {
  static_assert(!kHasScore<Policy> || kFeatures == cuda::Features::kAll, "where a policy's scores are asked for");

 public:
  static constexpr int kRows = 2 * Traits::kBlockM / (16 * Traits::kRowWarps);  // a thread's rows of the tile

  __device__ ForwardScores(const ForwardParams& p, const SeqlenInfo& seq, const cuda::TileWork& work, const Rows& rows)
      : p_(p),
        seq_(seq),
        rows_(rows),
        policy_(p.mask, seq, work.batch, work.head),
        stages_(p, seq, work.batch, work.head),
        alibi_(p.score, seq, work.batch, work.head),
        k_descale_(p, work.batch, head_kv(p, work, rows)),
        m0_(work.block * Traits::kBlockM),
        unit_(score_unit<kFeatures, kHasScore<Policy>>(p.score)),
        softmax_(unit_.to_log2()) {
    if constexpr (cuda::has_dropout(kFeatures)) rng_ = DropoutRng(p.score.dropout, work.batch).of(work.head);
  }

  __device__ TileWalk walk(int m_block) const {
    if constexpr (Rows::kShared && std::is_same_v<Policy, BandPolicy>) {
      const int first = rows_.query(m0_), last = rows_.query(m0_ + Traits::kBlockM - 1);
      return policy_.row_walk_from(flashsdk::Tile{last - first + 1, Traits::kBlockN}, first);
    } else {
      return policy_.row_walk(flashsdk::Tile{Traits::kBlockM, Traits::kBlockN}, m_block);
    }
  }

  // Scores become probabilities; out is rescaled to their maximum.
  template <class Accumulator, class Out, class Bias>
  __device__ void apply(Accumulator& acc, Out& acc_out, TileRef tile, const Bias& bias) {
    auto scores = as_matrix(acc);
    auto out = as_matrix(acc_out);
    auto coordinates = matrix_coordinates<Traits::kBlockM, Traits::kBlockN>(typename Traits::Mma{});
    int n0 = tile.index * Traits::kBlockN;
    using At = cuda::TileCoordinates<false, decltype(coordinates)>;
    if constexpr (Traits::kFp8Kv) cuda::for_each_element(scores, [&](int, int, float& s) { s *= k_descale_.factor; });
    if constexpr (kFeatures == cuda::Features::kBias) {
      bias.add(scores, At{coordinates, m0_, n0}, p_.score.softmax_scale);
    } else {
      if constexpr (kFeatures == cuda::Features::kAlibi) alibi_.add(scores, At{coordinates, m0_, n0});
      cuda::branch_if(unit_.scale_first(), [&] {
        if constexpr (cuda::modifies_scores(kFeatures)) {
          stages_.apply(scores, [&] { return At{coordinates, m0_, n0}; }, bias);
        } else {
          cuda::for_each_element(scores, [&](int, int, float& s) { s *= p_.score.softmax_scale; });
        }
      });
    }
    cuda::branch_if(tile.partial || n0 + Traits::kBlockN > seq_.seqlen_k, [&] {
      if constexpr (Rows::kShared) {
        const auto queries = [&](int i, int j) {
          return cute::make_tuple(rows_.query(m0_ + cute::get<0>(coordinates(i, j))), cute::get<1>(coordinates(i, j)));
        };
        cuda::mask_tile<false>(scores, queries, policy_, tile.partial, 0, n0, seq_.seqlen_k, -INFINITY);
      } else {
        cuda::mask_tile<false>(scores, coordinates, policy_, tile.partial, m0_, n0, seq_.seqlen_k, -INFINITY);
      }
    });
    softmax_.step(scores, out);
  }

  // The probabilities as 16-bit operand of the second product, without what dropout drops.
  template <class Accumulator>
  __device__ auto kept_probabilities(const Accumulator& acc, TileRef tile) const {
    auto probabilities = convert<typename Traits::Element>(acc);
    if constexpr (cuda::has_dropout(kFeatures)) {
      cuda::branch_if(p_.score.dropout.threshold > 0, [&] {
        auto coordinates = matrix_coordinates<Traits::kBlockM, Traits::kBlockN>(typename Traits::Mma{});
        cuda::drop_elements(probabilities, coordinates, rng_, p_.score.dropout.threshold, m0_,
                            tile.index * Traits::kBlockN);
      });
    }
    return probabilities;
  }

  // Divides out by the row sums, in which a sink joins, and writes the log-sum-exp.
  template <class Out>
  __device__ void finish(Out& acc_out, const cuda::TileWork& work) {
    auto out = as_matrix(acc_out);
    auto coordinates = matrix_coordinates<Traits::kBlockM, 16>(typename Traits::Mma{});
    float* lse = seq_.rows(p_.lse, work.batch, work.head);
    softmax_.finish();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = m0_ + cute::get<0>(coordinates(i, 0));
      const cuda::RowEnd end =
          softmax_.end(i, unit_.to_natural(), p_.sink.of(work.head, min_of(row, seq_.seqlen_q - 1)));
      float factor = end.factor * scale_of_out<typename Traits::Element, kFeatures>(p_.score);
      if constexpr (Traits::kFp8Kv)
        factor = factor == 0.f ? 0.f : factor * v_descale(work);  // of no key: 0, also of NaN
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(out); ++j) out(i, j) *= factor;
      if (threadIdx.x % 4 == 0 && row < seq_.seqlen_q) lse[row * p_.lse.row] = end.lse;
    }
  }

  // Writes what this part of the keys says of out, for join_parts_kernel.
  template <class Out>
  __device__ void leave(const Out& acc_out, const cuda::TileWork& work, const KeySplit& split, int slot) {
    auto out = as_matrix(acc_out);
    auto coordinates = matrix_coordinates<Traits::kBlockM, Traits::kHeadDimV>(typename Traits::MmaOut{});
    softmax_.finish();
    [[maybe_unused]] float descale = 1.f;
    if constexpr (Traits::kFp8Kv) descale = v_descale(work);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row_of_head = m0_ + cute::get<0>(coordinates(i, 0));
      // Of packed sequences longer than the caller said, what has a place.
      if (row_of_head >= min_of(seq_.seqlen_q * split.shared.heads, split.rows_of_head)) continue;
      const std::int64_t row = split.row(slot, work.head, row_of_head);
      if (threadIdx.x % 4 == 0) split.states[row] = {softmax_.max(i), softmax_.sum(i)};
      CUTE_UNROLL
      for (int j = 0; j < cute::size<1>(out); j += 2) {  // neighbours
        const int column = cute::get<1>(coordinates(i, j));
        auto* target = reinterpret_cast<float2*>(split.out + row * split.columns + column);
        if (column >= split.columns) continue;
        if constexpr (Traits::kFp8Kv) {
          const float factor = softmax_.sum(i) == 0.f ? 0.f : descale;  // of no key: 0, also of NaN
          *target = {factor * out(i, j), factor * out(i, j + 1)};
        } else {
          *target = {out(i, j), out(i, j + 1)};
        }
      }
    }
  }

  // For kernels whose warps have seen other keys of the same rows: what this one knows of a row, after end_rows().
  __device__ void end_rows() { softmax_.finish(); }
  __device__ RowState state(int i) const { return {softmax_.max(i), softmax_.sum(i)}; }
  __device__ const cuda::ScoreUnit& unit() const { return unit_; }
  __device__ float v_descale(const cuda::TileWork& work) const {
    return p_.v_descale.of(work.batch, head_kv(p_, work, rows_));
  }

 private:
  static __device__ int head_kv(const ForwardParams& p, const cuda::TileWork& work, const Rows& rows) {
    return rows.head(work.head, 0) / p.heads_per_group();
  }

  const ForwardParams& p_;
  const SeqlenInfo& seq_;
  Rows rows_;
  Policy policy_;
  cuda::ScoreStages<kFeatures, Policy> stages_;
  cuda::AlibiAlone<kFeatures> alibi_;
  KeyDescale<Traits::kFp8Kv> k_descale_;
  DropoutRng rng_;
  int m0_;
  cuda::ScoreUnit unit_;
  cuda::OnlineSoftmax<kRows> softmax_;
};

// Where the queries of shared rows lie.
template <class Element>
struct SharedQueryRows {
  const Element* first;  // of the first of the heads
  const TensorParam& q;
  SharedRows shared;
  __device__ const Element* at(int row) const {
    return first + shared.query(row) * q.row + shared.head(0, row) * q.head;
  }
  __device__ const Element* any() const { return first; }
};

// q: of the first of the heads.
template <class Io, class Smem, class Element>
__device__ void load_queries(const Io& io, Smem& smem, const Element* q, const TensorParam& t, OwnRows, int m0,
                             int rows) {
  io.load(smem, q + m0 * t.row, t.row, rows - m0);
}
template <class Io, class Smem, class Element>
__device__ void load_queries(const Io& io, Smem& smem, const Element* q, const TensorParam& t, SharedRows shared,
                             int m0, int rows) {
  io.load(smem, SharedQueryRows<Element>{q, t, shared}, m0, rows - m0);
}

// Keys: AllKeys, or KeySplit, where the grid's second dimension is for its parts.
template <class Traits, class Policy, cuda::Features kFeatures, class Keys>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ cuda::TileSchedule schedule,
                   const __grid_constant__ Keys keys) {
  constexpr bool kSplit = Keys::kSplit;
  using Element = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kHeadDim = Traits::kHeadDim, kHeadDimV = Traits::kHeadDimV;
  constexpr bool kSideBySide = Traits::kColumnWarps > 1;
  using QIo = TileIo<Element, kBlockM, kHeadDim, Traits::kThreads, Traits::kAnyAlignment>;
  using KIo = TileIo<Element, kBlockN, kHeadDim, Traits::kThreads, Traits::kAnyAlignment>;
  using VIo = TileIo<Element, kBlockN, kHeadDimV, Traits::kThreads, Traits::kAnyAlignment>;
  using OutIo = TileIo<Element, kBlockM, kHeadDimV, Traits::kThreads, Traits::kAnyAlignment>;
  using Bias = ForwardBias<Traits, kFeatures, Keys>;
  static_assert(Traits::kStages == 1 || Bias::kBytes == 0, "with two stages no bias is loaded");
  static_assert(!kSplit || !std::is_same_v<Policy, BlockSparsePolicy>, "tiles of a part follow each other");

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  cuda::TileWork work = schedule.work(blockIdx.x);
  KeyPart part;
  if (!take_part(p, keys, work, part, smem_bytes)) return;
  const SeqlenInfo seq(p, work.batch);
  const auto shared = keys.shared;
  const int m0 = work.block * kBlockM, rows = seq.seqlen_q * shared.heads, head = shared.head(work.head, 0);
  if (m0 >= rows) return;

  Element* smem = reinterpret_cast<Element*>(smem_bytes);
  auto k_tile = [&](int stage) { return smem + Traits::SmemQ::kElements + stage * Traits::SmemK::kElements; };
  auto v_tile = [&](int stage) {
    if constexpr (Traits::kValuesInKeys)
      return k_tile(stage);
    else if constexpr (kSideBySide)
      return k_tile(Traits::kStages) + stage * Traits::SmemV::kElements;
    else
      return k_tile(Traits::kStages + stage);  // as wide as K's
  };
  auto sQ = row_major<typename Traits::SmemQ>(smem);  // (kBlockM, kHeadDim)
  auto sK = [&](int stage) { return row_major<typename Traits::SmemK>(k_tile(stage)); };
  auto sV = [&](int stage) { return row_major<typename Traits::SmemV>(v_tile(stage)); };
  auto sVt = [&](int stage) { return transposed<typename Traits::SmemV>(v_tile(stage)); };

  const int head_kv = head / p.heads_per_group(), thread = threadIdx.x;
  const int keys_of = kSplit && p.pages.table != nullptr ? 0 : work.batch;
  const Element* k = seq.head_k<const Element>(p.k, keys_of, head_kv);
  const Element* v = seq.head_k<const Element>(p.v, keys_of, head_kv);
  [[maybe_unused]] typename KIo::Pages pages;  // of the tile that is loaded next: those of a part follow each other
  auto ask_pages = [&](int tile) {
    if constexpr (kSplit) {
      if (p.pages.table != nullptr)
        pages = KIo(thread, 0).ask_pages(p.pages, work.batch, tile * kBlockN, seq.seqlen_k - tile * kBlockN);
    }
  };
  auto load_keys = [&](const auto& io, auto smem, const TensorParam& t, const Element* first, TileRef tile) {
    const int n0 = tile.index * kBlockN, rows = seq.seqlen_k - n0;
    if (p.pages.table == nullptr)
      io.load(smem, first + n0 * t.row, t.row, rows);
    else if constexpr (kSplit)
      io.load(smem, first, t, pages, p.pages.size, n0, rows);
    else
      io.load(smem, seq.keys<const Element>(p, t, work.batch, head_kv), n0, rows);
  };
  auto load_k = [&](TileRef tile, int stage) { load_keys(KIo(thread, p.head_dim), sK(stage), p.k, k, tile); };
  auto load_v = [&](TileRef tile, int stage) {
    if constexpr (!Traits::kValuesInKeys) load_keys(VIo(thread, p.head_dim_v), sV(stage), p.v, v, tile);
  };

  ForwardScores<Traits, Policy, kFeatures, decltype(shared)> scores(p, seq, work, shared);
  const Bias bias(p.score, seq, work.batch, work.head, smem_bytes + Traits::kSmemBytes);
  TileWalk walk = walk_of_part(keys, scores.walk(work.block), part);
  TileRef tile;
  bool more = walk.next(tile);

  const Element* q = seq.head_q<const Element>(p.q, work.batch, head);
  load_queries(QIo(thread, p.head_dim), sQ, q, p.q, shared, m0, rows);
  if (more) {
    ask_pages(tile.index);
    load_k(tile, 0);
    if constexpr (Traits::kStages == 2) {
      load_v(tile, 0);
      ask_pages(tile.index + 1);
    }
  }
  cute::cp_async_fence();

  Mma mma;
  typename Traits::MmaOut mma_out;
  auto acc_out = cute::partition_fragment_C(mma_out, Shape<Int<kBlockM>, Int<kHeadDimV>>{});
  cute::clear(acc_out);
  [[maybe_unused]] auto* shared_scores = reinterpret_cast<float4*>(smem + Traits::kElements);
  auto q_operand = operand_a(mma, sQ, SumContiguous{});
  if constexpr (Traits::kQInRegisters) {
    cute::cp_async_wait<0>();
    __syncthreads();
    CUTE_UNROLL
    for (int i = 0; i < cute::size<2>(q_operand.fragment); ++i) q_operand.fetch(i);
  }

  for (int stage = 0; more;) {
    auto acc = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
    cute::clear(acc);
    TileRef next;
    const bool has_next = walk.next(next);

    cute::cp_async_wait<0>();  // K, and with two stages V, has arrived …
    __syncthreads();           // … for all, and all are done with what is overwritten now
    if constexpr (Traits::kStages == 2) {
      if (has_next) {
        load_k(next, stage ^ 1);
        load_v(next, stage ^ 1);
        ask_pages(next.index + 1);
      }
    } else {
      load_v(tile, 0);
      ask_pages(tile.index + 1);
      bias.load(m0, tile.index * kBlockN);
    }
    cute::cp_async_fence();

    if constexpr (kSideBySide) {
      ColumnWarps<Traits>::multiply(acc, smem, k_tile(stage), p.head_dim, shared_scores);
      if constexpr (Traits::kStages == 2) __syncthreads();  // they are complete
    } else if constexpr (Traits::kQInRegisters) {
      gemm(mma, acc, RegisterOperand{q_operand.fragment}, operand_b(mma, sK(stage), SumContiguous{}));
    } else {
      gemm(mma, acc, q_operand, operand_b(mma, sK(stage), SumContiguous{}));
    }
    if constexpr (Traits::kStages == 1) {
      cute::cp_async_wait<0>();
      __syncthreads();
      if (has_next) load_k(next, 0);
      cute::cp_async_fence();
    }
    if constexpr (kSideBySide) ColumnWarps<Traits>::collect(acc, shared_scores);

    scores.apply(acc, acc_out, tile, bias);
    auto probabilities = scores.kept_probabilities(acc, tile);
    auto p_fragment = as_operand_a(probabilities);
    if constexpr (kSideBySide)
      gemm_by_pieces<ColumnWarps<Traits>::kPiece, kBlockN>(mma_out, acc_out, p_fragment, v_tile(stage), p.head_dim_v);
    else
      gemm(mma, acc_out, RegisterOperand{p_fragment}, operand_b(mma, sVt(stage), SumStrided{}));

    tile = next;
    more = has_next;
    if constexpr (Traits::kStages == 2) stage ^= 1;
  }

  if constexpr (kSplit) {
    cute::cp_async_wait<0>();  // of Q, where this part has no keys
    scores.leave(acc_out, work, keys, part.slot);
    return;
  }
  scores.finish(acc_out, work);
  auto out = convert<Element>(acc_out);
  cute::cp_async_wait<0>();
  __syncthreads();  // Q's place is free
  auto sOut = row_major<typename Traits::SmemOut>(smem);
  store_accumulator(mma_out, out, sOut);
  __syncthreads();
  OutIo(thread, p.head_dim_v)
      .store(sOut, seq.head_q<Element>(p.out, work.batch, work.head) + m0 * p.out.row, p.out.row, seq.seqlen_q - m0);
}

}  // namespace flashsdk::sm80
