// The forward kernels of keys and values in float8_e4m3fn, which become the 16-bit type of q on their way to the
// tensor cores. Everything between the two products is that of forward.h.
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

  cuda::TileWork work = schedule.work(blockIdx.x);
  KeyPart part;
  if (!take_part(keys, work, part)) return;
  const SeqlenInfo seq(p, work.batch);
  const auto shared = keys.shared;
  const int m0 = work.block * kBlockM, rows = seq.seqlen_q * shared.heads, head = shared.head(work.head, 0);
  if (m0 >= rows) return;

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
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

// The places in shared memory of a warp's keys: rows of kRowBytes, whose vectors are permuted such that eight lanes
// reach all banks, whether they copy two rows, read half of each of two (K), or a vector of each of eight (V).
template <int kRowBytes>
struct Fp8Rows {
  static constexpr int kVectors = kRowBytes / cuda::kFp8Vector;  // of a row
  static_assert(kVectors >= 4 && (kVectors & (kVectors - 1)) == 0);

  // What a row's vectors are permuted by. Of sums of rows without common bits it is the sum.
  static __device__ constexpr int mix(int row) { return ((row & 1) << 2 | (row >> 1 & 3)) & (kVectors - 1); }
  static __device__ constexpr int at(int row, int vector) {
    return row * kRowBytes + (vector ^ mix(row)) * cuda::kFp8Vector;
  }
};

// Keys and values of one warp on their way from device memory: tiles of kKeys, in kStages places that take turns.
template <class Traits>
class Fp8KeyStream {
  static constexpr int kKeys = Traits::kBlockN, kRowBytes = Traits::kHeadDim, kVector = cuda::kFp8Vector;
  using Rows = Fp8Rows<kRowBytes>;
  static constexpr int kRowStep = 32 / Rows::kVectors, kPasses = kKeys / kRowStep, kKeysOfLane = ceil_div(kKeys, 32);
  static_assert(kKeys % kRowStep == 0 && 32 % kRowStep == 0);

 public:
  __device__ Fp8KeyStream(const ForwardParams& p, const SeqlenInfo& seq, int batch, int head_kv, unsigned char* smem)
      : p_(p),
        batch_(batch),
        seqlen_k_(seq.seqlen_k),
        row_(threadIdx.x % 32 / Rows::kVectors),
        k_(seq.head_k<const std::uint8_t>(p.k, p.pages.table != nullptr ? 0 : batch, head_kv) + column()),
        v_(seq.head_k<const std::uint8_t>(p.v, p.pages.table != nullptr ? 0 : batch, head_kv) + column()),
        smem_(smem),
        place_(cute::cast_smem_ptr_to_uint(smem) + Rows::at(row_, column() / kVector)) {}

  // Where the keys and values of a stage are.
  __device__ const unsigned char* k(int stage) const { return smem_ + stage * kStageBytes; }
  __device__ const unsigned char* v(int stage) const { return k(stage) + Traits::kCopiedBytes; }

  // Asks which pages a tile's keys are in: well ahead of its load(), as tables lie in memory.
  __device__ void ask_pages(int tile) {
    if (p_.pages.table == nullptr) return;
    CUTE_UNROLL
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = tile * kKeys + i * 32 + static_cast<int>(threadIdx.x) % 32;
      const std::int64_t place = batch_ * p_.pages.batch + PagePlace::of(key, p_.pages.size).page;
      pages_[i] = key < seqlen_k_ ? p_.pages.table[place] : 0;
    }
  }
  // Starts the copy of a tile. What lies beyond the last key or beyond the head dimension becomes zero.
  __device__ void load(int tile, int stage) const {
    const int first = tile * kKeys + row_, rows = seqlen_k_ - first;
    const int k_rows = column() < p_.head_dim ? rows : 0, v_rows = column() < p_.head_dim_v ? rows : 0;
    const std::uint32_t place = place_ + stage * kStageBytes;
    if (p_.pages.table == nullptr) {
      const std::uint8_t *k = k_ + first * p_.k.row, *v = v_ + first * p_.v.row;
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        copy(place, pass, k, k_rows);
        copy(place + Traits::kCopiedBytes, pass, v, v_rows);
        k += kRowStep * p_.k.row;
        v += kRowStep * p_.v.row;
      }
    } else {
      // One after the other: addresses of both would take registers that there are not.
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const TensorParam& t = i == 0 ? p_.k : p_.v;
        load_pages(place + i * Traits::kCopiedBytes, i == 0 ? k_ : v_, t.batch, t.row, first, i == 0 ? k_rows : v_rows);
      }
    }
  }

 private:
  static constexpr int kStageBytes = 2 * Traits::kCopiedBytes;

  // Of this lane's vectors.
  static __device__ int column() { return static_cast<int>(threadIdx.x) % Rows::kVectors * kVector; }

  // Row row_ + pass · kRowStep. These two have no bits in common, so that they are mixed one by one (Rows::at).
  static __device__ void copy(std::uint32_t place, int pass, const std::uint8_t* from, int rows) {
    const int row = pass * kRowStep;
    const std::uint32_t to = (place ^ static_cast<std::uint32_t>(Rows::mix(row) * kVector)) + row * kRowBytes;
    cuda::copy_vector_async(to, from, row < rows ? kVector : 0);
  }
  // From pass to pass a row moves on by as much in its page, or in the next.
  __device__ void load_pages(std::uint32_t place, const std::uint8_t* from, std::int64_t page_stride,
                             std::int64_t row_stride, int first, int rows) const {
    const int size = p_.pages.size, step = PagePlace::of(kRowStep, size).row;
    int row = PagePlace::of(first, size).row;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int lane = (row_ + pass * kRowStep) % 32;
      const std::int64_t page = __shfl_sync(0xffffffffu, pages_[pass * kRowStep / 32], lane);
      copy(place, pass, from + page * page_stride + row * row_stride, rows);
      row += step;
      if (row >= size) row -= size;
    }
  }

  const ForwardParams& p_;
  int batch_, seqlen_k_;
  int row_;  // of this lane's first vector of a tile
  const std::uint8_t *k_, *v_;
  unsigned char* smem_;
  std::uint32_t place_;          // of that vector in the first stage
  int pages_[kKeysOfLane] = {};  // of keys lane, 32 + lane, … of the tile that is loaded next
};

// Operands of the two products, straight from bytes. Sums run over the head dimension and over keys in an order of
// ours, the same in both operands, in which what a lane needs lies together.
template <class Traits>
class Fp8Products {
  using Element = typename Traits::Element;
  using Instruction = typename MmaInstruction<Element>::type;
  using Rows = Fp8Rows<Traits::kHeadDim>;
  static constexpr int kKeys = Traits::kBlockN, kHeadDim = Traits::kHeadDim, kVector = cuda::kFp8Vector;
  static constexpr int kSlabs = kHeadDim / 64;  // of four vectors, which the four lanes of a row read

 public:
  static constexpr int kQueryBytes = 16 * kHeadDim * static_cast<int>(sizeof(Element));

  // queries: kQueryBytes that all warps share, as each needs all of them.
  __device__ explicit Fp8Products(unsigned char* queries) : q_(reinterpret_cast<uint4*>(queries) + threadIdx.x % 32) {}

  // This warp's share of the queries: rows from `first` on, where from.at(row) says. There are `rows` of them.
  template <class QueryRows>
  __device__ void load_queries(const QueryRows& from, int first, int rows, int columns) const {
    CUTE_UNROLL
    for (int piece = 0; piece < 2 * kSlabs; ++piece) {
      if (piece % Traits::kWarps != static_cast<int>(threadIdx.x) / 32) continue;
      const int column = 64 * (piece / 2) + kVector * quarter() + cuda::kVectorElements * (piece % 2);
      uint4 of[2];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int row = group() + 8 * half;
        of[half] = row < rows && column < columns ? *reinterpret_cast<const uint4*>(from.at(first + row) + column)
                                                  : uint4{0, 0, 0, 0};
      }
      *query(2 * piece) = {of[0].x, of[1].x, of[0].y, of[1].y};
      *query(2 * piece + 1) = {of[0].z, of[1].z, of[0].w, of[1].w};
    }
  }

  // acc, of (16, kKeys), += Q·Kᵀ. Step i of a slab sums over elements 4i to 4i + 3 of each lane's vector.
  template <class Accumulator>
  __device__ void scores(Accumulator& acc, const unsigned char* k) const {
    CUTE_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      // Rows 8n + group() are all mixed as group() is.
      const unsigned char* first = k + Rows::at(group(), 4 * slab + quarter());
      uint4 q[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) q[i] = *query(4 * slab + i);
      CUTE_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint4 vector = *reinterpret_cast<const uint4*>(first + 8 * n * kHeadDim);
        const std::uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) multiply(acc, n, q[i], pairs<0>(words[i]), pairs<1>(words[i]));
      }
    }
  }

  // acc_out, of (16, kHeadDim), += P·V. Its columns are permuted: column().
  template <class Accumulator, class Probabilities>
  __device__ void output(Accumulator& acc_out, const Probabilities& probabilities, const unsigned char* v) const {
    const auto p = cute::recast<const std::uint32_t>(probabilities);
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    // ldmatrix takes pairs of neighbouring columns for elements: of keys to 8 and from 8 on, of two vectors.
    const int row = matrix % 2 * 8 + lane % 8, right = matrix / 2;
    CUTE_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint4 a{p(4 * step), p(4 * step + 1), p(4 * step + 2), p(4 * step + 3)};
      CUTE_UNROLL
      for (int vector = 0; vector < Rows::kVectors; vector += 2) {
        const unsigned char* from = v + 16 * step * kHeadDim + Rows::at(row, vector | right);
        std::uint32_t words[4];
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2],
                                      words[3]);
        // Two keys of the column on the left, then two of the one on the right.
        for (std::uint32_t& word : words) word = cuda::pick_bytes(word, 0, 0x3120);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t low = words[2 * i], high = words[2 * i + 1];
          multiply(acc_out, 2 * (vector + i), a, pairs<0>(low), pairs<0>(high));
          multiply(acc_out, 2 * (vector + i) + 1, a, pairs<1>(low), pairs<1>(high));
        }
      }
    }
  }
  // A lane's elements of vector `vector`, of row group() + 8·half: four neighbours, the first in column().
  static __device__ int column(int vector) { return vector * kVector + quarter() * 4; }
  template <class Accumulator>
  static __device__ float4 neighbours(const Accumulator& acc_out, int vector, int half) {
    const auto at = [&](int right, int i) { return acc_out(4 * (2 * vector + right) + 2 * half + i); };
    return {at(0, 0), at(1, 0), at(0, 1), at(1, 1)};
  }
  // Of this lane: its row of eight, and its place among the four lanes that share that.
  static __device__ int group() { return threadIdx.x % 32 / 4; }
  static __device__ int quarter() { return threadIdx.x % 4; }

 private:
  template <int kHalf>
  static __device__ std::uint32_t pairs(std::uint32_t word) {
    return cuda::pair_from_fp8<Element, kHalf>(word);
  }
  template <class Accumulator>
  static __device__ void multiply(Accumulator& acc, int n, const uint4& a, std::uint32_t b0, std::uint32_t b1) {
    float &c0 = acc(4 * n), &c1 = acc(4 * n + 1), &c2 = acc(4 * n + 2), &c3 = acc(4 * n + 3);
    Instruction::fma(c0, c1, c2, c3, a.x, a.y, a.z, a.w, b0, b1, c0, c1, c2, c3);
  }
  // What this lane holds of Q in a step of the first product.
  __device__ uint4* query(int step) const { return q_ + step * 32; }

  uint4* q_;
};

// Of few rows and many keys: the grid's second dimension is for the parts of these, and each warp has a part of a part.
template <class Traits, class Policy, cuda::Features kFeatures>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinBlocks)
    fp8_split_forward_kernel(const __grid_constant__ ForwardParams p,
                             const __grid_constant__ cuda::TileSchedule schedule,
                             const __grid_constant__ KeySplit split) {
  using Element = typename Traits::Element;
  using Products = Fp8Products<Traits>;
  constexpr int kBlockM = Traits::kBlockM, kKeys = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  constexpr int kWarps = Traits::kWarps, kStages = Traits::kStages;

  cuda::TileWork work = schedule.work(blockIdx.x);
  if (split.ends != nullptr) cuda::wait_for_kernel_before();
  const KeyPart part = split.part(blockIdx.y, work.batch);
  if (part.parts == 0) return;
  work.batch = part.batch;
  const SeqlenInfo seq(p, work.batch);
  const int m0 = work.block * kBlockM, rows = seq.seqlen_q * split.shared.heads - m0;
  if (rows <= 0) return;
  const int head = split.shared.head(work.head, 0), warp = cuda::warp_uniform(static_cast<int>(threadIdx.x) / 32);

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  constexpr int kWarpBytes = kStages * 2 * Traits::kCopiedBytes;
  Products products(smem_bytes + kWarps * kWarpBytes);
  auto* states =
      reinterpret_cast<RowState*>(smem_bytes + kWarps * kWarpBytes + Products::kQueryBytes);  // (kWarps, kBlockM)
  ForwardScores<Traits, Policy, kFeatures, SharedRows> scores(p, seq, work, split.shared);
  const TileWalk walk = scores.walk(work.block).part(part.index * kWarps + warp, part.parts * kWarps);
  cuda::allow_next_kernel();

  Fp8KeyStream<Traits> keys(p, seq, work.batch, head / p.heads_per_group(), smem_bytes + warp * kWarpBytes);
  CUTE_UNROLL
  for (int stage = 0; stage < kStages; ++stage) {
    keys.ask_pages(walk.begin() + stage);
    if (walk.begin() + stage < walk.end()) keys.load(walk.begin() + stage, stage);
    cute::cp_async_fence();
  }
  keys.ask_pages(walk.begin() + kStages);
  const Element* q = seq.head_q<const Element>(p.q, work.batch, head);
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

  // What the warps have found is joined as join_parts_kernel joins what thread blocks have.
  scores.end_rows();
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (Products::quarter() == 0) states[warp * kBlockM + Products::group() + 8 * half] = scores.state(half);
  }
  __syncthreads();                                    // and all are done with their keys, of which none are under way
  auto* outs = reinterpret_cast<float*>(smem_bytes);  // (kWarps, kWarpBytes): (kBlockM, kHeadDim) each
  const auto state_of = [&](int of_warp, int row) { return states[of_warp * kBlockM + row]; };
  const auto most_of = [&](int row) {
    float most = state_of(0, row).max;
    CUTE_UNROLL
    for (int i = 1; i < kWarps; ++i) most = fmaxf(most, state_of(i, row).max);
    return most;
  };
  const auto weight_of = [&](float max, float most) {
    return cuda::exp2_approx(scores.unit().to_log2() * (max - (most == -INFINITY ? 0.f : most)));
  };
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = Products::group() + 8 * half;
    const float weight = weight_of(scores.state(half).max, most_of(row));
    const float factor = weight == 0.f ? 0.f : weight * scores.v_descale(work);  // of no key: 0, also of NaN
    auto* target = outs + (warp * kWarpBytes) / sizeof(float) + row * kHeadDim;
    CUTE_UNROLL
    for (int vector = 0; vector < kHeadDim / cuda::kFp8Vector; ++vector) {
      const float4 x = Products::neighbours(acc_out, vector, half);
      *reinterpret_cast<float4*>(target + Products::column(vector)) = {factor * x.x, factor * x.y, factor * x.z,
                                                                       factor * x.w};
    }
  }
  __syncthreads();
  const bool whole = split.has_one_part();                 // there is no second kernel
  const int left = min_of(rows, split.rows_of_head - m0);  // rows that have a place
  for (int i = threadIdx.x; i < kBlockM * kHeadDim / 4; i += Traits::kThreads) {
    const int row = i / (kHeadDim / 4), column = i % (kHeadDim / 4) * 4;
    if (row >= left || column >= split.columns) continue;
    float4 sum{0.f, 0.f, 0.f, 0.f};
    CUTE_UNROLL
    for (int of = 0; of < kWarps; ++of) {
      const float4 x =
          *reinterpret_cast<const float4*>(outs + (of * kWarpBytes) / sizeof(float) + row * kHeadDim + column);
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    RowState all{most_of(row), 0.f};
    CUTE_UNROLL
    for (int of = 0; of < kWarps; ++of) all.sum += weight_of(state_of(of, row).max, all.max) * state_of(of, row).sum;
    if (whole) {
      const int query = split.shared.query(m0 + row), own = split.shared.head(work.head, m0 + row);
      const cuda::RowEnd end = cuda::end_of_row(all.max, all.sum, scores.unit().to_natural(), p.sink.of(own, query));
      const float factor = end.factor * scale_of_out<Element, kFeatures>(p.score);
      Element* out = seq.head_q<Element>(p.out, work.batch, own) + query * p.out.row + column;
      *reinterpret_cast<uint2*>(out) = {cuda::pack<Element>(sum.x * factor, sum.y * factor),
                                        cuda::pack<Element>(sum.z * factor, sum.w * factor)};
      if (column == 0) seq.rows(p.lse, work.batch, own)[query * p.lse.row] = end.lse;
    } else {
      const std::int64_t at = split.row(part.slot, work.head, m0 + row);
      *reinterpret_cast<float4*>(split.out + at * split.columns + column) = sum;
      if (column == 0) split.states[at] = all;
    }
  }
}

}  // namespace flashsdk::sm80
