// The forward kernel of keys and values in float8_e4m3fn and of many rows: they become the 16-bit type of q on their
// way to the tensor cores. Everything between the two products is that of forward.h.
#pragma once

#include "sm80/forward.h"
#include "sm80/fp8_tile_io.h"

namespace flashsdk::sm80 {

// Of any number of queries. While a tile is computed the next one is copied, K and V each a product ahead of its turn.
// Keys: as of forward_kernel. With KeySplit one part of all keys writes the output itself, unless heads share a tile.
template <class Traits, class Policy, cuda::Features kFeatures, class Keys>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    fp8_forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ cuda::TileSchedule schedule,
                       const __grid_constant__ Keys keys) {
  constexpr bool kSplit = Keys::kSplit;
  using Element = typename Traits::Element;
  using Mma = typename Traits::Mma;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  using QIo = TileIo<Element, kBlockM, kHeadDim, Traits::kThreads, Traits::kAnyAlignment>;
  using KvIo = Fp8TileIo<Element, kBlockN, kHeadDim, Traits::kThreads, Traits::kAnyAlignment>;
  static_assert(ForwardBias<Traits, kFeatures, Keys>::kBytes == 0, "no tile of a bias is loaded");
  static_assert(!kSplit || !std::is_same_v<Policy, BlockSparsePolicy>, "tiles of a part follow each other");

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  cuda::TileWork work = schedule.work(blockIdx.x);
  KeyPart part;
  if (!take_part(p, keys, work, part, smem_bytes)) return;
  const SeqlenInfo seq(p, work.batch);
  const auto shared = keys.shared;
  const int m0 = work.block * kBlockM, rows = seq.seqlen_q * shared.heads, head = shared.head(work.head, 0);
  if (m0 >= rows) return;

  auto tile_at = [&](int element) {
    return cute::make_smem_ptr(reinterpret_cast<Element*>(smem_bytes) + Traits::SmemQ::kElements + element);
  };
  constexpr int kOfV = Traits::SmemKV::kElements;
  auto sQ = cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(smem_bytes)),
                              typename Traits::SmemQ::RowMajor{});  // (kBlockM, kHeadDim)
  auto sK = cute::make_tensor(tile_at(0), typename Traits::SmemKV::RowMajor{});
  auto sV = cute::make_tensor(tile_at(kOfV), typename Traits::SmemKV::RowMajor{});
  auto sVt = cute::make_tensor(tile_at(kOfV), typename Traits::SmemKV::Transposed{});
  unsigned char* copied = smem_bytes + Traits::Tiles::kSmemBytes;

  const int thread = threadIdx.x, head_kv = head / p.heads_per_group();
  const KvIo k_io(thread, p.head_dim, copied), v_io(thread, p.head_dim_v, copied + Traits::kCopiedBytes);
  auto load = [&](const KvIo& io, const TensorParam& t, TileRef tile) {
    const int n0 = tile.index * kBlockN;
    io.load(seq.keys<const std::uint8_t>(p, t, work.batch, head_kv), n0, seq.seqlen_k - n0);
  };

  ForwardScores<Traits, Policy, kFeatures, decltype(shared)> scores(p, seq, work, shared);
  const cuda::NoBiasTile bias;
  TileWalk walk = walk_of_part(keys, scores.walk(work.block), part);
  TileRef tile;
  bool more = walk.next(tile);

  const Element* q = seq.head_q<const Element>(p.q, work.batch, head);
  load_queries(QIo(thread, p.head_dim), sQ, q, p.q, shared, m0, rows);
  if (more) load(k_io, p.k, tile);
  cute::cp_async_fence();
  if (more) load(v_io, p.v, tile);
  cute::cp_async_fence();

  Mma mma;
  auto acc_out = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});
  cute::clear(acc_out);
  while (more) {
    auto acc = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
    cute::clear(acc);
    TileRef next;
    const bool has_next = walk.next(next);
    // What a thread has copied arrives in order: of the two copies under way the one that is waited for is K's, then
    // V's. It is converted before the next is started, into its place.
    auto take = [&](const KvIo& io, auto& smem, const TensorParam& t) {
      cute::cp_async_wait<1>();
      io.convert(smem);
      if (has_next) load(io, t, next);
      cute::cp_async_fence();
    };

    take(k_io, sK, p.k);
    __syncthreads();  // K, and Q, are there for all, and all are done with V
    gemm(mma, acc, operand_a(mma, sQ, SumContiguous{}), operand_b(mma, sK, SumContiguous{}));
    take(v_io, sV, p.v);
    __syncthreads();  // V is there for all, and all are done with K

    scores.apply(acc, acc_out, tile, bias);
    auto probabilities = scores.kept_probabilities(acc, tile);
    auto p_fragment = as_operand_a(probabilities);
    gemm(mma, acc_out, RegisterOperand{p_fragment}, operand_b(mma, sVt, SumStrided{}));
    tile = next;
    more = has_next;
  }

  cute::cp_async_wait<0>();  // of Q, where there are no keys
  if constexpr (kSplit) {
    if (!keys.writes_output()) {
      scores.leave(acc_out, work, keys, part.slot);
      return;
    }
  }
  scores.finish(acc_out, work);
  auto out = cuda::convert<Element>(acc_out);
  __syncthreads();  // Q's place is free
  store_accumulator(mma, out, sQ);
  __syncthreads();
  QIo(thread, p.head_dim_v)
      .store(sQ, seq.head_q<Element>(p.out, work.batch, work.head) + m0 * p.out.row, p.out.row, seq.seqlen_q - m0);
}

}  // namespace flashsdk::sm80
