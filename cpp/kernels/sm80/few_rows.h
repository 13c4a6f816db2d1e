// The forward kernel of few rows and many keys, as in decoding. In tiles of 64 rows, whose rows are dealt to four
// warps, each warp multiplies all keys, also where 60 of the rows are empty. Here a tile has 16 rows, each warp has all
// of them, and the keys are dealt to the warps. A warp copies its own keys and waits for nobody until its last one.
// Everything between the two products is that of forward.h.
#pragma once

#include "sm80/arrivals.h"
#include "sm80/few_rows_products.h"
#include "sm80/forward.h"
#include "sm80/row_join.h"

namespace flashsdk::sm80 {

template <class Traits>
using RowProductsOf = std::conditional_t<Traits::kFp8Kv, Fp8Products<Traits>, PlainProducts<Traits>>;

// What the warps of a thread block have found is joined in the places of their keys. out(row, column, sum, all) gets
// four columns of each of `left` rows, relative to all.max.
template <class Traits, class Products, class Scores, class Accumulator, class Rows, class Out>
__device__ void join_keys_of_warps(unsigned char* smem, const Scores& scores, const cuda::TileWork& work,
                                   const Accumulator& acc_out, const Rows& rows_out, int left, int columns, Out&& out) {
  constexpr int kWarps = Traits::kWarps, kVectors = Traits::kHeadDim / 4;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  auto* states = reinterpret_cast<RowState*>(smem + Traits::kStatesAt);
  const auto state_of = [&](int of_warp, int row) -> RowState& { return states[of_warp * Traits::kBlockM + row]; };
  const auto out_of = [&](int of_warp, int row) {
    return reinterpret_cast<float*>(smem + of_warp * Traits::kWarpBytes) + row * Traits::kOutPitch;
  };
  const auto most_of = [&](int row) {
    float most = state_of(0, row).max;
    CUTE_UNROLL
    for (int i = 1; i < kWarps; ++i) most = fmaxf(most, state_of(i, row).max);
    return most;
  };
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half)
    if (Products::quarter() == 0) state_of(warp, Products::group() + 8 * half) = scores.state(half);
  __syncthreads();  // and all are done with their keys, of which none are under way
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = Products::group() + 8 * half;
    if (row >= left) break;
    float factor = rows_out.weight(scores.state(half).max, most_of(row));
    if constexpr (Traits::kFp8Kv)
      factor = factor == 0.f ? 0.f : factor * scores.v_descale(work);  // of no key: 0, also of NaN
    Products::write(acc_out, half, factor, out_of(warp, row));
  }
  __syncthreads();
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < left * kVectors; i += Traits::kThreads) {
    const int row = i / kVectors, column = i % kVectors * 4;
    if (column >= columns) continue;
    float4 sum{0.f, 0.f, 0.f, 0.f};
    RowState all{most_of(row), 0.f};
    CUTE_UNROLL
    for (int from = 0; from < kWarps; ++from) {
      const float4 x = *reinterpret_cast<const float4*>(out_of(from, row) + column);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
      all.sum += rows_out.weight(state_of(from, row).max, all.max) * state_of(from, row).sum;
    }
    out(row, column, sum, all);
  }
}

// Of few rows and many keys: the grid's second dimension is for the parts of these, and each warp has a part of a part.
template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    few_rows_forward_kernel(const __grid_constant__ ForwardParams p,
                            const __grid_constant__ cuda::TileSchedule schedule,
                            const __grid_constant__ KeySplit split) {
  using Element = typename Traits::Element;
  using Products = RowProductsOf<Traits>;
  constexpr int kBlockM = Traits::kBlockM, kKeys = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kWarps = Traits::kWarps, kStages = Traits::kStages;

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  cuda::TileWork work = schedule.work(blockIdx.x);
  KeyPart part;
  if (!take_part(p, split, work, part, smem_bytes)) return;
  const SeqlenInfo seq(p, work.batch);
  const int m0 = work.block * kBlockM, rows = seq.seqlen_q * split.shared.heads - m0;
  if (rows <= 0) return;
  const bool whole = part.parts == 1, joins = !whole && split.planned;
  const int tile_of_all = (work.batch * split.heads + work.head) * schedule.num_blocks + work.block;
  const Arrivals arrivals(split.arrivals + tile_of_all, split.launch);
  if (joins && part.index == 0 && threadIdx.x == 0) arrivals.set_up(part.parts);
  const int head = split.shared.head(work.head, 0), warp = cuda::warp_uniform(static_cast<int>(threadIdx.x) / 32);

  ForwardScores<Traits, Policy, kFeatures, SharedRows> scores(p, seq, work, split.shared);
  const TileWalk walk = scores.walk(work.block).part(part.index * kWarps + warp, part.parts * kWarps);
  cuda::allow_next_kernel();

  KeyStream<Traits> keys(p, seq, work.batch, head / p.heads_per_group(), smem_bytes + warp * Traits::kWarpBytes);
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    keys.ask_pages(walk.begin() + stage);
    if (walk.begin() + stage < walk.end()) keys.load(walk.begin() + stage, stage);
    cute::cp_async_fence();
  }
  keys.ask_pages(walk.begin() + kStages);
  const Element* q = seq.head_q<const Element>(p.q, work.batch, head);
  const Products products(smem_bytes + Traits::kQueriesAt);
  products.load_queries(SharedQueryRows<Element>{q, p.q, split.shared}, m0, rows, p.head_dim);
  __syncthreads();

  typename Traits::Mma mma;
  auto acc_out = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});
  cute::clear(acc_out);
  for (int tile = walk.begin(), stage = 0; tile < walk.end(); ++tile) {
    cute::cp_async_wait<kStages - 1>();  // the oldest tile has arrived …
    __syncwarp();                        // … for all lanes
    auto acc = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kKeys>>{});
    cute::clear(acc);
    products.scores(acc, keys.k(stage));
    const TileRef ref{tile, walk.is_partial(tile)};
    scores.apply(acc, acc_out, ref, cuda::NoBiasTile{});
    products.output(acc_out, scores.kept_probabilities(acc, ref), keys.v(stage));
    __syncwarp();  // all lanes have read it
    if (tile + kStages < walk.end()) {
      keys.load(tile + kStages, stage);
      keys.ask_pages(tile + kStages + 1);
    }
    cute::cp_async_fence();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }

  scores.end_rows();
  const RowJoin<Traits, kFeatures> rows_out(p, seq, work, split, scores.unit(), m0);
  const int left = min_of(min_of(rows, split.rows_of_head - m0), kBlockM);  // rows that have a place
  join_keys_of_warps<Traits, Products>(smem_bytes, scores, work, acc_out, rows_out, left, split.columns,
                                       [&](int row, int column, const float4& sum, const RowState& all) {
                                         if (whole)
                                           rows_out.write(row, column, sum, all);
                                         else
                                           rows_out.leave(part.slot, row, column, sum, all);
                                       });
  if (joins && arrivals.is_last(reinterpret_cast<int*>(smem_bytes + Traits::kStatesAt))) rows_out.join(part, left);
}

}  // namespace flashsdk::sm80
