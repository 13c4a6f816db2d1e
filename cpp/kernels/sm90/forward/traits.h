// What the SM90 forward knows at compile time: its tile, its products, its shared memory, and how its roles talk.
#pragma once

#include <type_traits>

#include "common/mask_policy.h"
#include "common/seqlen_info.h"
#include "sm90/messages.h"
#include "sm90/traits.h"
#include "table/sm90.h"

namespace flashsdk::sm90 {

// What the warp that walks the mask tells all others (sm90/messages.h). They know no schedule, and of the mask the
// diagonals alone; a policy that has none they ask themselves (ForwardScores::visible).
//
// Work: the tile of queries that the steps are of.
struct alignas(16) ForwardWork {
  int m0;  // first query; negative where the tile begins before the sequence
  int head, batch;
  int key_end;         // keys from here on do not exist
  KeyRange diagonals;  // of partial tiles: values of key − query that are visible
  SeqlenInfo sequence;
  float alibi_slope = 0.f;
};
// One tile of keys of it, told before the keys are there.
struct alignas(16) ForwardStep {
  enum Flags : int {
    kFirst = 1,    // of its queries
    kLast = 2,     // of its queries
    kPartial = 4,  // which keys are hidden, the mask says, not only where keys end
    kEnd = 8,      // there is no tile: all work is done
    // Of each warpgroup, shifted by its number:
    kMasked = 1 << 8,  // some key is hidden from some of its queries (or, ALiBi: keys on both sides of the diagonal) …
    kShowsFirst = 1 << 12,  // … but the tile's first from none
    kHidden = 1 << 16,      // all are from all, and its queries have had a tile before
  };
  int n0;  // first key
  int flags;
  int row;   // of K and V, where the tile starts
  int rows;  // that belong to the sequence

  __device__ bool has(Flags flag, int warpgroup = 0) const { return (flags >> warpgroup & flag) != 0; }
  // What few tiles have: these take more than the common step (forward/warpgroup.h).
  __device__ static int uncommon(int warpgroup) { return kFirst | kEnd | (kMasked | kHidden) << warpgroup; }
};

// Stages are buffers. A tile's K is held until its softmax is done, as a failed try needs it again, V only under its
// product: where there is room for one more, K gets it. With two of Q, the next queries are there before these are
// done.
// Row::kRow is a row of the table, table::Sm90Forward.
template <class Row, class Element_>
struct ForwardTraits {
  static constexpr table::Sm90Forward kRow = Row::kRow;
  using Element = Element_;
  static constexpr int kHeadDim = kRow.head_dim.qk, kHeadDimV = kRow.head_dim.v;
  static constexpr int kBlockM = kRow.tile.m, kBlockN = kRow.tile.n;
  static constexpr int kStagesK = kRow.stages_k, kStagesV = kRow.stages_v, kStagesQ = kRow.stages_q;
  static constexpr bool kTries = kRow.tuning.tries, kTurns = kRow.tuning.turns, kReadsAhead = kRow.tuning.reads_ahead;
  static constexpr bool kFromLastBegunByAll =
      kRow.tuning.from_last_begun_by_all && std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr int kWarpgroups = kBlockM / kWarpgroupRows;  // that compute; one more loads
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr bool kStoresAtOnce = kWarpgroups == 2;    // of the output: see store_accumulator_at_once()
  static constexpr bool kQueriesWithValues = kBlockM > 128;  // whether Q is loaded by the warp that loads V
  // A warpgroup passes over tiles of keys of which it sees nothing. With two warpgroups these are tiles of fewer than
  // 128 keys: the last under a causal mask is hidden from the first 64 queries (log-sm90-forward.md, version 15). With
  // more, tiles are counted from the end of a sequence: under a causal mask what is left over sees the fewest keys
  // then, not the most. Dropout draws for 16 queries at once, so that the end is a multiple of these.
  static constexpr bool kFromEnd = kWarpgroups > 2, kSkips = kFromEnd || kBlockN < 128;
  static_assert(!(kStoresAtOnce && kFromEnd));  // rows begin with 0 there
  static __device__ int first_query(int m_block, int seqlen_q) {
    constexpr int kDrawn = 16;
    const int end = kFromEnd ? ceil_div(seqlen_q, kDrawn) * kDrawn : ceil_div(seqlen_q, kBlockM) * kBlockM;
    return end - (ceil_div(seqlen_q, kBlockM) - m_block) * kBlockM;
  }
  static constexpr int kLoadRegisters = registers_of(kRow).load, kComputeRegisters = registers_of(kRow).compute;

  using SmemQ = SmemTile<Element, kBlockM, kHeadDim, kStagesQ>;
  using SmemK = SmemTile<Element, kBlockN, kHeadDim, kStagesK>;
  using SmemV = SmemTile<Element, kBlockN, kHeadDimV, kStagesV>;
  using MmaScores = SmemMma<Element, kBlockN, kHeadDim, kSumContiguous, kSumContiguous>;
  using MmaOut = RegisterMma<Element, kHeadDimV, kBlockN, kSumStrided>;

  // Messages outlive the keys: work is read until its output is written, which is after the next work's first keys have
  // been released. Nobody releases their slots, as the ring of K keeps the warp that tells from being so far ahead.
  static constexpr int kSlots = 8;
  static_assert(kSlots >= kStagesK + 3);  // a step is told before there is room for its keys

  struct Smem {
    alignas(1024) Element q[kStagesQ * SmemQ::kElements];
    alignas(1024) Element k[kStagesK * SmemK::kElements];
    alignas(1024) Element v[kStagesV * SmemV::kElements];
    MessageSlots<ForwardWork, kSlots> work;  // there before its first step is told
    MessageSlots<ForwardStep, kSlots> step;
    Messages<ForwardStep, kSlots, 0> step_ring;  // waited for by the warp that loads V; with kReadsAhead by all
    Ring<kStagesQ> q_ring;
    Ring<kStagesK> k_ring;
    Ring<kStagesV> v_ring;
    cutlass::arch::ClusterTransactionBarrier tail;  // see ValueLoader::load_cut
  };
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Smem));
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace flashsdk::sm90
