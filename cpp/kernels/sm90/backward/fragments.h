// How fragments of the SM90 backward get to shared memory.
#pragma once

#include <cstdint>

#include "common/seqlen_info.h"
#include "cuda/schedule/tile_scheduler.h"
#include "sm90/gemm.h"
#include "sm90/named_barriers.h"
#include "sm90/pipeline.h"

namespace flashsdk::sm90 {

// Writes a 16-bit accumulator fragment, 64 rows x kColumns, transposed to a slab of shared memory as SmemTile has it:
// kColumns rows of 64 elements. thread: of the warpgroup.
template <class Fragment>
__device__ __forceinline__ void store_transposed(const Fragment& fragment, void* slab, int thread) {
  auto words = cute::recast<std::uint32_t>(as_atoms(fragment));  // ((1, 2), 1, N): two columns of row r, of row r + 8
  constexpr int kAtoms = decltype(cute::size<2>(words))::value;
  static_assert(kAtoms % 2 == 0);
  // stmatrix takes the address of each row of 16 bytes from one lane: matrix l / 8, row l % 8. Matrices are rows r and
  // r + 8 of one atom, then of the next; transposed, their rows are the fragment's columns.
  const int lane = thread % 32, matrix = lane / 8, row = lane % 8;
  const int chunk = thread / 32 * 2 + matrix % 2;  // of 16 bytes; the swizzle exchanges them by the row
  char* address = static_cast<char*>(slab) + (matrix / 2 * 8 + row) * 128 + ((chunk ^ row) * 16);
  CUTE_UNROLL
  for (int atom = 0; atom < kAtoms; atom += 2) {
    cute::SM90_U16x8_STSM_T::copy(words(cute::make_coord(0, 0), 0, atom), words(cute::make_coord(0, 1), 0, atom),
                                  words(cute::make_coord(0, 0), 0, atom + 1),
                                  words(cute::make_coord(0, 1), 0, atom + 1),
                                  *reinterpret_cast<cute::uint128_t*>(address + atom * 8 * 128));
  }
}

template <class Layout, class Element>
__device__ __forceinline__ auto smem_tensor(Element* data) {
  return cute::make_tensor(cute::make_smem_ptr(data), Layout{});
}

// A thread's number in its warpgroup. Through a shuffle, so that it is kept in a register: asked anew wherever it is
// needed, which is what the compiler makes of threadIdx.x, it takes longer than most of what is done with it.
__device__ __forceinline__ int kept_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup, static_cast<int>(threadIdx.x) % 32);
}

// A warp's share of a ring: what its lanes wrote to shared memory, also for the tensor cores and TMA to read.
template <int kStages>
__device__ __forceinline__ void publish(const Ring<kStages>& ring, const RingSlot<kStages>& slot, int thread) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (thread % 32 == 0) ring.arrive_full(slot);
}

// A warpgroup's piece of dQ, in the order of the accumulator's registers, for the warp that adds it; publish() it then.
// n: pieces before. There is one buffer, though more barriers: the piece before must have left.
template <int kStages, class Accumulator>
__device__ __forceinline__ void store_dq(float* smem, const Ring<kStages>& ring, unsigned n, const Accumulator& acc,
                                         int thread) {
  ring.wait_empty(RingSlot<kStages>::after(n + kStages - 1));
  float4* target = reinterpret_cast<float4*>(smem) + thread;
  CUTE_UNROLL
  for (int e = 0; e < cute::size(acc); e += 4)
    target[e / 4 * kWarpgroup] = make_float4(acc(e), acc(e + 1), acc(e + 2), acc(e + 3));
}

// Rows that do not count: their values, if they are not finite, would not vanish when multiplied by zero. By one
// warpgroup.
template <class Tile, bool kRagged, class Element, class Counts>
__device__ __forceinline__ void clear_rows(Element* tile, Counts&& counts) {
  constexpr int kVectors = Tile::kSlabColumns / 8;  // in a row of a slab
  constexpr int kAtOnce = kRagged ? 4 : 1;          // every ragged sequence ends so; elsewhere it is rare
#pragma unroll kAtOnce
  for (int i = threadIdx.x % kWarpgroup; i < Tile::kSlabs * Tile::kRows * kVectors; i += kWarpgroup)
    if (!counts(i / kVectors % Tile::kRows)) reinterpret_cast<uint4*>(tile)[i] = uint4{};
}
// All computing warpgroups, once rows are cleared. Those that run different code may not wait at one barrier, each in a
// place of its own (synccheck): the first waits until the second has come, and then lets it go on.
template <class Traits>
__device__ __forceinline__ void meet(int warpgroup) {
  constexpr int kThreads = Traits::kWarpgroups * kWarpgroup;
  constexpr std::uint32_t kHere = named_barrier::kBackwardClear;
  cutlass::arch::fence_view_async_shared();
  if constexpr (!Traits::kWide) {
    barrier_sync(kHere, kThreads);
  } else if (warpgroup == 0) {
    barrier_sync(kHere, kThreads);
    barrier_arrive(kHere + 1, kThreads);
  } else {
    barrier_arrive(kHere, kThreads);
    barrier_sync(kHere + 1, kThreads);
  }
}

// The same of K and V, or of Q and dO; one warpgroup each.
template <class Traits, bool kRagged, class First, class Second, class Element, class Counts>
__device__ __forceinline__ void clear_both(Element* first, Element* second, int warpgroup, Counts&& counts) {
  static_assert(First::kRows == Second::kRows);
  if (warpgroup == 0) clear_rows<First, kRagged>(first, counts);
  if (warpgroup == 1) clear_rows<Second, kRagged>(second, counts);
  meet<Traits>(warpgroup);
}

// Ragged: a tile's last keys belong to another sequence, or are not used.
template <class Traits>
__device__ __forceinline__ void clear_key_tail(typename Traits::Smem& smem, int k_buffer, int keys, int warpgroup) {
  using SmemK = typename Traits::SmemK;
  using SmemV = typename Traits::SmemV;
  clear_both<Traits, true, SmemK, SmemV>(smem.k + k_buffer * SmemK::kElements, smem.v, warpgroup,
                                         [&](int row) { return row < keys; });
}

// Whether a tile has queries that count as zeros and may hold anything: those that see no key, for which it is marked,
// or, behind the end of a ragged sequence, those of the next. Its last row is then one of these.
template <bool kRagged, int kBlockM>
__device__ __forceinline__ bool has_blind_queries(const cuda::LseTile<kBlockM>& tile) {
  return tile.top != nullptr || (kRagged && tile.lse_log2[kBlockM - 1] == INFINITY);
}
// Clears those: Q and dO, which must have arrived.
template <class Traits, bool kRagged>
__device__ __forceinline__ void clear_blind_queries(typename Traits::Smem& smem, int q_stage, int dout_stage,
                                                    int warpgroup) {
  using SmemQ = typename Traits::SmemQ;
  using SmemDo = typename Traits::SmemDo;
  const float* lse_log2 = smem.lse[q_stage].lse_log2;
  clear_both<Traits, kRagged, SmemQ, SmemDo>(smem.q + q_stage * SmemQ::kElements,
                                             smem.dout + dout_stage * SmemDo::kElements, warpgroup,
                                             [&](int row) { return lse_log2[row] != INFINITY; });
}

// dK or dV of a warpgroup's 64 keys, from row `first` of the sequence on.
template <class Element, class Accumulator>
__device__ __forceinline__ void store_gradient(Accumulator& acc, float scale, const TensorParam& t,
                                               const SeqlenInfo& seq, const cuda::TileWork& work, int first,
                                               int columns) {
  for (int i = 0; i < cute::size(acc); ++i) acc(i) *= scale;
  store_accumulator_at_once(convert<Element>(acc), seq.head_k<Element>(t, work.batch, work.head) + first * t.row, t.row,
                            seq.seqlen_k - first, columns);
}

}  // namespace flashsdk::sm90
