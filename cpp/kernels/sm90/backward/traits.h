// What the SM90 backward knows at compile time: its tile, its products, its shared memory.
//
// A thread block owns kBlockN keys, 64 to a warpgroup, and walks the tiles of kBlockM queries that see them. Scores are
// computed transposed, Sᵀ = K·Qᵀ, so that Pᵀ and dSᵀ leave the accumulators as register operands of dV += Pᵀ·dO and
// dK += dSᵀ·Q; dS goes through shared memory, because dQᵀ = Kᵀ·dSᵀ sums over the keys of all warpgroups.
#pragma once

#include "cuda/pass/backward_workspace.h"
#include "cuda/schedule/tile_scheduler.h"
#include "sm90/backward/cluster.h"
#include "sm90/backward/dropout_bytes.h"
#include "sm90/messages.h"
#include "sm90/traits.h"
#include "table/sm90.h"

namespace flashsdk::sm90 {

// What the warp that walks the mask tells (sm90/messages.h). One step, for those that compute: it comes with Q.
struct BackwardStep {
  int head, m_block;
  bool partial;
  bool last;
};
// … and as it is told to those that load and write.
struct PlannedStep {
  BackwardStep step;
  int tile;  // of queries, in the workspace
  int turn;  // there, in a deterministic call (turn_order.h)
};
constexpr int kPlannedSteps = 8;  // that the walking warp may be ahead
// The next tile of keys.
struct BackwardWork {
  cuda::TileWork tile;
  bool visited;  // some tile of queries sees these keys
  bool stop;     // there is no more work
};

// For head dimensions up to 128. kStagesDo: buffers of dO, and of Q; kStagesK: of K (a second V gains nothing, and its
// place is needed where kDraws); kStaggered: see cuda::QueryStream; kDraws: dropout without softcap, drawn for
// a warpgroup at once (dropout_bytes.h).
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kStagesDo_, int kStagesK_,
          bool kStaggered_, bool kDraws_>
struct NarrowBackwardTraits {
  static constexpr bool kWide = false;
  static constexpr int kClusterSize = 1;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kCtaKeys = kBlockN;
  static constexpr int kWarpgroups = kBlockN / kWarpgroupRows;  // that compute; one more loads and writes
  static_assert(kWarpgroups <= 2, "one warp walks, one loads, and one for each of these writes");
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  // Of messages: the threads that load and add, and of work all that compute.
  static constexpr int kStepReaders = 1 + kWarpgroups, kWorkReaders = kStepReaders + kWarpgroups * kWarpgroup;
  static constexpr bool kDraws = kDraws_;
  static constexpr int kLoadRegisters = 24, kComputeRegisters = 240;
  static constexpr int kStagesDo = kStagesDo_, kStagesQ = kStagesDo, kStagesK = kStagesK_, kStagesDs = 2;
  static constexpr bool kKeysAhead = kStagesK > 1;  // the next tile's K does not wait for this one's dQ
  static constexpr bool kStaggered = kStaggered_;

  // Kᵀ is operand A of dQ, 64 rows at a time.
  static constexpr int kHeadDimQ = round_up(kHeadDim, kWarpgroupRows);
  using SmemQ = SmemTile<Element, kBlockM, kHeadDim, kStagesQ>;
  using SmemDo = SmemTile<Element, kBlockM, kHeadDimV, kStagesDo>;
  using SmemK = SmemTile<Element, kBlockN, kHeadDimQ, kStagesK>;
  using SmemV = SmemTile<Element, kBlockN, kHeadDimV>;
  using SmemScores = SmemTile<Element, kBlockM, kBlockN, kStagesDs>;  // dS

  using MmaScores = SmemMma<Element, kBlockM, kHeadDim, kSumContiguous, kSumContiguous>;  // Sᵀ and dPᵀ
  using MmaDk = RegisterMma<Element, kHeadDim, kBlockM, kSumStrided>;
  using MmaDv = RegisterMma<Element, kHeadDimV, kBlockM, kSumStrided>;

  // dQᵀ (head_dim, queries) is dealt to the warpgroups by 64 rows first, then by columns. A piece has its own place in
  // shared memory and in dq_accum, where it lies in the order of its accumulator's registers.
  static constexpr int kDqPieces = kWarpgroups;
  static constexpr bool kClearsDq = false;  // the first key tile of a piece writes it, see FirstWriter
  static constexpr int kDqRowPieces = kHeadDimQ / kWarpgroupRows;  // along head_dim
  static constexpr int kDqColumns = kBlockM * kDqRowPieces / kDqPieces;
  static constexpr int kDqElements = kWarpgroupRows * kDqColumns;
  static_assert(kDqPieces % kDqRowPieces == 0 && kDqColumns % 8 == 0);
  using MmaDq = SmemMma<Element, kDqColumns, kBlockN, kSumStrided, kSumContiguous>;
  using Bytes = DropoutBytes<kBlockM>;

  struct Smem {
    alignas(1024) Element q[kStagesQ * SmemQ::kElements];
    alignas(1024) Element dout[kStagesDo * SmemDo::kElements];
    alignas(1024) Element k[kStagesK * SmemK::kElements];
    alignas(1024) Element v[SmemV::kElements];
    alignas(1024) Element ds[kStagesDs * SmemScores::kElements];
    alignas(128) float dq[kWarpgroups][kDqElements];
    alignas(128) cuda::LseTile<kBlockM> lse[kStagesQ];
    alignas(128) float minus_delta[kStagesDo][kBlockM];
    BackwardStep step[kStagesQ];
    MessageSlots<BackwardWork, 2> work;
    MessageSlots<PlannedStep, kPlannedSteps> plan;
    SharedDropoutBytes<Bytes, kDraws ? kWarpgroups : 0> drawn;
    Ring<kStagesQ> q_ring;      // with lse and step
    Ring<kStagesDo> dout_ring;  // with delta
    Ring<kStagesK> k_ring;
    Ring<1> v_ring;
    Ring<kStagesDs> ds_ring;               // from and to the computing warps
    Ring<kDqPieces> dq_ring[kWarpgroups];  // of one buffer, but two steps' barriers: add_in_turn() leaves out a step
    Messages<BackwardWork, 2, kWorkReaders> work_ring;
    Messages<PlannedStep, kPlannedSteps, kStepReaders> plan_ring;

    __device__ void init() {
      constexpr int kWarps = 4 * kWarpgroups;
      q_ring.init(1, kWarps);
      dout_ring.init(1, kWarps);
      k_ring.init(1, kWarps);
      v_ring.init(1, kWarps);
      ds_ring.init(kWarps, kWarps);
      for (auto& ring : dq_ring) ring.init(4, 1);
      work_ring.init();
      plan_ring.init();
    }
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= 227 * 1024);
};

// For larger head dimensions, where dK and dV of 64 keys fill the registers of a warpgroup each: one warpgroup computes
// Pᵀ and dV, the other dSᵀ and dK, and dQ is shared out in pieces. Both own the same 64 keys. kStagesDo: buffers of dO,
// and Q has one more, as dK needs it last.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kStagesDo_, int kStagesK_,
          bool kStaggered_, bool kDraws_>
struct WideBackwardTraits {
  static constexpr bool kWide = true;
  static constexpr int kClusterSize = 1;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kHeadDimQ = kHeadDim_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kCtaKeys = kBlockN;
  static_assert(kBlockN == kWarpgroupRows && kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  static_assert(kStagesK_ == 1, "shared memory has no room for the next K");
  static_assert(!kDraws_, "dropout is drawn where it is applied");
  static constexpr bool kDraws = false;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  static constexpr int kStepReaders = 1 + kWarpgroups, kWorkReaders = kStepReaders + kWarpgroups * kWarpgroup;
  static constexpr int kLoadRegisters = 24, kComputeRegisters = 240;
  static constexpr int kStagesDo = kStagesDo_, kStagesQ = kStagesDo + 1, kStagesK = kStagesK_, kStagesDs = 2;
  static constexpr bool kKeysAhead = kStagesK > 1;
  static constexpr bool kStaggered = kStaggered_;

  using SmemQ = SmemTile<Element, kBlockM, kHeadDim, kStagesQ>;
  using SmemDo = SmemTile<Element, kBlockM, kHeadDimV, kStagesDo>;
  using SmemK = SmemTile<Element, kBlockN, kHeadDim>;
  using SmemV = SmemTile<Element, kBlockN, kHeadDimV>;
  using SmemScores = SmemTile<Element, kBlockM, kBlockN, kStagesDs>;  // dS

  using MmaScores = SmemMma<Element, kBlockM, kHeadDim, kSumContiguous, kSumContiguous>;
  using MmaDk = RegisterMma<Element, kHeadDim, kBlockM, kSumStrided>;
  using MmaDv = RegisterMma<Element, kHeadDimV, kBlockM, kSumStrided>;

  // As many pieces for one warpgroup as for the other.
  static constexpr int kDqRowPieces = kHeadDim / kWarpgroupRows;
  static constexpr int kDqColumns = kDqRowPieces % 2 == 0 ? kBlockM : kBlockM / 2;
  static constexpr int kDqPieces = kDqRowPieces * kBlockM / kDqColumns;
  static constexpr bool kClearsDq = true;  // two pieces a step leave no time to ask what has been written
  static constexpr int kDqElements = kWarpgroupRows * kDqColumns;
  using MmaDq = SmemMma<Element, kDqColumns, kBlockN, kSumStrided, kSumContiguous>;

  static constexpr int kScoreElements = kBlockM * kBlockN;
  struct Smem {
    alignas(1024) Element q[kStagesQ * SmemQ::kElements];
    alignas(1024) Element dout[kStagesDo * SmemDo::kElements];
    alignas(1024) Element k[kStagesK * SmemK::kElements];
    alignas(1024) Element v[SmemV::kElements];
    alignas(1024) Element ds[kStagesDs * SmemScores::kElements];
    alignas(128) Element p[kStagesDs][kScoreElements];  // in the order of accumulator registers
    alignas(128) float dq[kWarpgroups][kDqElements];
    alignas(128) cuda::LseTile<kBlockM> lse[kStagesQ];
    alignas(128) float minus_delta[kStagesDo][kBlockM];
    BackwardStep step[kStagesQ];
    MessageSlots<BackwardWork, 2> work;
    MessageSlots<PlannedStep, kPlannedSteps> plan;
    Ring<kStagesQ> q_ring;
    Ring<kStagesDo> dout_ring;
    Ring<kStagesK> k_ring;
    Ring<1> v_ring;
    Ring<kStagesDs> ds_ring;               // from the one warpgroup to both
    EmptyRing<kStagesDs> p_ring;           // a named barrier says that P is there
    Ring<kDqPieces> dq_ring[kWarpgroups];  // of one buffer, but two steps' barriers: add_in_turn() leaves out a step
    Messages<BackwardWork, 2, kWorkReaders> work_ring;
    Messages<PlannedStep, kPlannedSteps, kStepReaders> plan_ring;

    __device__ void init() {
      constexpr int kWarps = 4 * kWarpgroups;
      q_ring.init(1, kWarps);
      dout_ring.init(1, kWarps);
      k_ring.init(1, kWarps);
      v_ring.init(1, kWarps);
      p_ring.init(4);
      ds_ring.init(4, kWarps);
      for (auto& ring : dq_ring) ring.init(4, 1);
      work_ring.init();
      plan_ring.init();
    }
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= 227 * 1024);
};

// Above head_dim 128 as above, but a cluster of two CTAs owns 128 keys, 64 each. What bounds the kernel above is the
// rate at which L2 adds dQ in fp32 (docs/dev/sm90-backward.md, "Pairs"). Here both CTAs hand each other their dS, 8 KiB
// of 16 bits, and each computes half of the rows of dQᵀ over all 128 keys: half as much is added. So each CTA needs a
// half of the other's K as well. dQ leaves from registers, as there is no shared memory left for it.
template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kStagesDo_, int kStagesK_,
          bool kStaggered_, bool kDraws_>
struct PairBackwardTraits {
  static constexpr bool kWide = true;
  static constexpr int kClusterSize = 2;
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = kHeadDimV_, kHeadDimQ = kHeadDim_;
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kCtaKeys = kBlockN / kClusterSize;
  static_assert(kCtaKeys == kWarpgroupRows && kHeadDim == 4 * kWarpgroupRows && kHeadDimV % 64 == 0);
  static_assert(kStagesDo_ == 1 && kStagesK_ == 1, "shared memory has no room for more");
  static_assert(!kDraws_, "dropout is drawn where it is applied");
  static constexpr bool kDraws = false, kStaggered = kStaggered_;
  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * kWarpgroup;
  // Of messages: the threads that load and send, and of work all that compute.
  static constexpr int kStepReaders = 2, kWorkReaders = kStepReaders + kWarpgroups * kWarpgroup;
  static constexpr int kLoadRegisters = 24, kComputeRegisters = 240;
  static constexpr int kStagesDo = 1, kStagesQ = 2, kStagesK = 1, kStagesDs = 2;
  static constexpr bool kKeysAhead = false;

  using SmemQ = SmemTile<Element, kBlockM, kHeadDim, kStagesQ>;
  using SmemDo = SmemTile<Element, kBlockM, kHeadDimV, kStagesDo>;
  using SmemK = SmemTile<Element, kCtaKeys, kHeadDim>;
  using SmemPeerK = SmemTile<Element, kCtaKeys, kHeadDim / kClusterSize>;  // the columns whose dQ this CTA computes
  using SmemV = SmemTile<Element, kCtaKeys, kHeadDimV>;
  using SmemScores = SmemTile<Element, kBlockM, kBlockN, kStagesDs>;  // dS: a slab of this CTA, one of the other
  static_assert(SmemScores::kSlabs == kClusterSize);

  using MmaScores = SmemMma<Element, kBlockM, kHeadDim, kSumContiguous, kSumContiguous>;
  using MmaDk = RegisterMma<Element, kHeadDim, kBlockM, kSumStrided>;
  using MmaDv = RegisterMma<Element, kHeadDimV, kBlockM, kSumStrided>;

  // A piece for each warpgroup of the two CTAs.
  static constexpr int kDqRowPieces = kHeadDim / kWarpgroupRows;
  static constexpr int kDqColumns = kBlockM;
  static constexpr int kDqPieces = kDqRowPieces;
  static constexpr bool kClearsDq = true;
  static constexpr int kDqElements = kWarpgroupRows * kDqColumns;
  using MmaDq = SmemMma<Element, kDqColumns, kCtaKeys, kSumStrided, kSumContiguous>;

  static constexpr int kScoreElements = kBlockM * kCtaKeys;
  struct Smem {
    alignas(1024) Element q[kStagesQ * SmemQ::kElements];
    alignas(1024) Element dout[kStagesDo * SmemDo::kElements];
    alignas(1024) Element k[SmemK::kElements];
    alignas(1024) Element peer_k[SmemPeerK::kElements];
    alignas(1024) Element v[SmemV::kElements];
    alignas(1024) Element ds[kStagesDs * SmemScores::kElements];
    alignas(128) Element p[kStagesDs][kScoreElements];  // in the order of accumulator registers
    alignas(128) cuda::LseTile<kBlockM> lse[kStagesQ];
    alignas(128) float minus_delta[kStagesDo][kBlockM];
    BackwardStep step[kStagesQ];
    int tile[kStagesQ];  // of queries, in the workspace
    MessageSlots<BackwardWork, 2> work;
    MessageSlots<PlannedStep, kPlannedSteps> plan;
    SharedIndex next_index;
    Ring<kStagesQ> q_ring;
    Ring<kStagesDo> dout_ring;
    Ring<kStagesK> k_ring;
    Ring<1> v_ring;
    Ring<kStagesDs> own_ds_ring;  // from the one warpgroup to the warp that sends it; empty when ds_ring is
    Ring<kStagesDs> ds_ring;      // of both CTAs, to all warpgroups of both
    EmptyRing<kStagesDs> p_ring;
    Messages<BackwardWork, 2, kWorkReaders> work_ring;
    Messages<PlannedStep, kPlannedSteps, kStepReaders> plan_ring;

    __device__ void init() {
      constexpr int kWarps = 4 * kWarpgroups;
      next_index.init();
      q_ring.init(1, kClusterSize * kWarps);
      dout_ring.init(1, kClusterSize * kWarps);
      k_ring.init(1, kWarps);
      v_ring.init(1, kWarps);
      p_ring.init(4);
      own_ds_ring.init(4, 1);
      ds_ring.init(1, kClusterSize * kWarps);
      work_ring.init();
      plan_ring.init();
    }
  };
  static constexpr int kSmemBytes = sizeof(Smem);
  static_assert(kSmemBytes <= 227 * 1024);
};

// Above head_dim 128 a tile of 64 keys is a CTA's, one of 128 a cluster's.
template <class Element, int kHeadDim, int kHeadDimV, int kBlockM, int kBlockN, int kStagesDo, int kStagesK,
          bool kStaggered, bool kDraws>
using BackwardTraits = std::conditional_t<
    (kHeadDim <= 128),
    NarrowBackwardTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kStagesDo, kStagesK, kStaggered, kDraws>,
    std::conditional_t<
        (kBlockN == kWarpgroupRows),
        WideBackwardTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kStagesDo, kStagesK, kStaggered, kDraws>,
        PairBackwardTraits<Element, kHeadDim, kHeadDimV, kBlockM, kBlockN, kStagesDo, kStagesK, kStaggered, kDraws>>>;

// Row::kRow is a row of the table, table::Sm90Backward. The parameters are in the kernels' names, with which these were
// measured.
template <class Row, Features kFeatures, class Element>
using BackwardTraitsOf = BackwardTraits<Element, Row::kRow.head_dim.qk, Row::kRow.head_dim.v, Row::kRow.tile.m,
                                        Row::kRow.tile.n, Row::kRow.stages_do, Row::kRow.stages_k, Row::kRow.staggered,
                                        table::draws_at_once(Row::kRow, kFeatures)>;

}  // namespace flashsdk::sm90
