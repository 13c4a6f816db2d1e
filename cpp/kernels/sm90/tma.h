// Copies of (rows, columns) tiles by the tensor memory accelerator: one thread starts them, an mbarrier counts bytes.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "sm90/traits.h"

namespace flashsdk::sm90 {

// What L2 should do with the lines of a copy.
using CacheHint = cute::TMA::CacheHintSm90;

// First coordinates of a tile; packed tensors have batch 0 and rows counted over all sequences.
struct TileOrigin {
  int row, head, batch;
};

// Starts the copy of one tile into its slabs. The barrier has been told kTile::kBytes; what lies beyond the tensor
// counts and becomes zero.
template <class kTile>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& barrier,
                                          void* smem, TileOrigin at, CacheHint hint = CacheHint::EVICT_NORMAL,
                                          int column = 0) {
#pragma unroll
  for (int slab = 0; slab < kTile::kSlabs; ++slab) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<std::uint64_t*>(&barrier), static_cast<std::uint64_t>(hint),
                                 static_cast<char*>(smem) + slab * kTile::kSlabBytes,
                                 column + slab * kTile::kSlabColumns, at.row, at.head, at.batch);
  }
}

// By one thread, before the first copies: these would else wait for the descriptors.
template <class... Maps>
__device__ __forceinline__ void prefetch_maps(const Maps&... maps) {
  (cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&maps)), ...);
}

// Starts the copy of a part of a tile, a box of the map that comes to its row `first`. A swizzle repeats every eight
// rows: first is a multiple of that.
template <class kTile>
__device__ __forceinline__ void load_box(const CUtensorMap& map, cutlass::arch::ClusterTransactionBarrier& barrier,
                                         void* smem, int first, TileOrigin at) {
  constexpr int kRowBytes = kTile::kSlabBytes / kTile::kRows;
#pragma unroll
  for (int slab = 0; slab < kTile::kSlabs; ++slab) {
    cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<std::uint64_t*>(&barrier),
                                 static_cast<std::uint64_t>(CacheHint::EVICT_NORMAL),
                                 static_cast<char*>(smem) + slab * kTile::kSlabBytes + first * kRowBytes,
                                 slab * kTile::kSlabColumns, at.row, at.head, at.batch);
  }
}

// A tile that all kCtas of a cluster need: each starts the copy of its share of the slabs to all of them. The place
// must be free in all. Each CTA tells its own barrier kTile::kBytes, perhaps after bytes of the other have come: the
// phase cannot end before it has arrived itself, and the phase before has ended, as consumers of both have released
// the place.
template <class kTile, int kCtas>
__device__ __forceinline__ void load_shared_tile(const CUtensorMap& map,
                                                 cutlass::arch::ClusterTransactionBarrier& barrier, void* smem,
                                                 TileOrigin at, CacheHint hint = CacheHint::EVICT_NORMAL) {
  if constexpr (kCtas == 1) {
    load_tile<kTile>(map, barrier, smem, at, hint);
  } else {
    static_assert(kTile::kSlabs % kCtas == 0);
    constexpr int kShare = kTile::kSlabs / kCtas;
    const int first = static_cast<int>(cute::block_rank_in_cluster()) * kShare;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int slab = first + i;
      cute::SM90_TMA_LOAD_MULTICAST_4D::copy(
          &map, reinterpret_cast<std::uint64_t*>(&barrier), static_cast<std::uint16_t>((1 << kCtas) - 1),
          static_cast<std::uint64_t>(hint), static_cast<char*>(smem) + slab * kTile::kSlabBytes,
          slab * kTile::kSlabColumns, at.row, at.head, at.batch);
    }
  }
}

}  // namespace flashsdk::sm90
