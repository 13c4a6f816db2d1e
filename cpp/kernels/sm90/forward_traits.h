// What the SM90 forward knows at compile time: its tile, its products, its shared memory, and how its roles talk.
#pragma once

#include "sm90/pipeline.h"
#include "sm90/traits.h"

namespace flashsdk::sm90 {

// What the warp that loads Q and K tells all others. They know nothing else of the work: no mask, no schedule.
struct alignas(16) QueryTile {
  int m_block, head, batch;
  int key_end;  // keys from here on do not exist
};
// One tile of keys of one tile of queries, announced with the keys themselves.
struct alignas(16) KeyTile {
  enum Flags : int {
    kFirst = 1,    // of its queries
    kLast = 2,     // of its queries
    kMasked = 4,   // some key is hidden from some query …
    kPartial = 8,  // … and which, the mask policy knows
    kEnd = 16,     // there is no tile: all work is done
  };
  int n0;  // first key
  int flags;
  int row;   // of K and V, where the tile starts
  int rows;  // that belong to the sequence

  __device__ bool has(Flags flag) const { return (flags & flag) != 0; }
};

// Stages are buffers. A tile's K is needed until its softmax is done, V only under its product: where there is room for
// one more, K gets it. With two of Q, the next queries are there before these are done.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kKeyStages_, int kValueStages_,
          int kQueryStages_, bool kTries_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_;
  static constexpr int kKeyStages = kKeyStages_, kValueStages = kValueStages_, kQueryStages = kQueryStages_;
  static constexpr bool kTries = kTries_;  // exponentials by the maximum so far: forward.h
  // Whether warpgroups start their products one after another. Those of other sizes run under each other's exponentials
  // by themselves, once a try has made these short.
  static constexpr bool kTurns = !kTries || kBlockN == 128;
  static constexpr int kWarpgroups = kBlockM / kWarpgroupRows;  // that compute; one more loads
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  // Each pays where registers and the time between two turns allow it, as measured: docs/sm90-forward.md, version 5.
  static constexpr bool kReadsAhead =
      kHeadDim > 64 && kHeadDim <= 128 && kBlockN == 128;                  // announcements, before the keys
  static constexpr bool kWritesLate = kHeadDim <= 64 && kWarpgroups == 2;  // under the next queries' second scores
  static constexpr bool kWholeStores = kHeadDim <= 128;                    // of the output: see store_accumulator()
  // Of 65536 a multiprocessor: what loading does not need, computing gets. S, P and the output take the most.
  static constexpr int kTileRegisters = kBlockN / 2 + kBlockN / 4 + kHeadDimV / 2;
  static constexpr bool kWide = kTileRegisters > 176;
  static constexpr int kLoadRegisters = kWarpgroups == 2 ? (kWide ? 40 : 56) : 32;
  static constexpr int kComputeRegisters = kWarpgroups == 2 ? (kWide ? 232 : 224) : kWarpgroups == 3 ? 160 : 112;

  using SmemQ = SmemTile<Element, kBlockM, kHeadDim, kQueryStages>;
  using SmemK = SmemTile<Element, kBlockN, kHeadDim, kKeyStages>;
  using SmemV = SmemTile<Element, kBlockN, kHeadDimV, kValueStages>;
  using MmaScores = SmemMma<Element, kBlockN, kHeadDim, kSumContiguous, kSumContiguous>;
  using MmaOut = RegisterMma<Element, kHeadDimV, kBlockN, kSumStrided>;

  // Announcements outlive the keys: they are read until the softmax of the next tile is done.
  static constexpr int kSlots = 8;
  static_assert(kSlots >= kKeyStages + 3);  // one is announced before there is room for its keys

  struct Smem {
    alignas(1024) Element q[kQueryStages * SmemQ::kElements];
    alignas(1024) Element k[kKeyStages * SmemK::kElements];
    alignas(1024) Element v[kValueStages * SmemV::kElements];
    QueryTile query_tiles[kSlots];
    KeyTile key_tiles[kSlots];
    cutlass::arch::ClusterBarrier announced[kSlots];  // to the warp that loads V
    Ring<kQueryStages> q_ring;
    Ring<kKeyStages> k_ring;
    Ring<kValueStages> v_ring;
    cutlass::arch::ClusterTransactionBarrier tail;  // see ValueLoader::load_cut
  };
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Smem));
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace flashsdk::sm90
