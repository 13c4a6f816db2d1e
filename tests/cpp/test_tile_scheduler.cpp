// The order in which thread blocks take tiles (cuda/tile_scheduler.h), as the host plans it.
#include <gtest/gtest.h>

#include <set>
#include <tuple>

#include "cuda/tile_scheduler.h"
#include "rng.h"

namespace flashsdk::testing {
namespace {

TEST(TileSchedule, TakesEveryTileOnce) {
  Rng rng(1);
  for (int round = 0; round < 500; ++round) {
    const int heads = between(rng, 1, 9), batch = between(rng, 1, 4);
    const cuda::TileSchedule schedule{between(rng, 1, 40), heads, heads * batch, between(rng, 1, 50),
                                      between(rng, 0, 1) == 1};
    std::set<std::tuple<int, int, int>> taken;
    for (int index = 0; index < schedule.size(); ++index) {
      const cuda::TileWork work = schedule.work(index);
      EXPECT_TRUE(work.block >= 0 && work.block < schedule.num_blocks && work.head < heads && work.batch < batch);
      EXPECT_TRUE(taken.emplace(work.block, work.head, work.batch).second) << "round " << round << " index " << index;
    }
  }
}

// 16 heads of 128 over 16K tokens: Q, dO and dQ of one fill L2's share.
ForwardParams long_problem(MaskKind kind) {
  ForwardParams p{};
  p.batch = 1;
  p.num_heads = p.num_heads_kv = 16;
  p.seqlen_q = p.seqlen_k = 16384;
  p.head_dim = p.head_dim_v = 128;
  p.mask.kind = kind;
  return p;
}
constexpr int kMultiprocessors = 132, kTileKeys = 128, kElementBytes = 2;
int section(const ForwardParams& p, int tile_keys = kTileKeys) {
  return cuda::backward_schedule(p, tile_keys, kElementBytes, kMultiprocessors).section;
}

TEST(BackwardSchedule, KeepsOneHeadInL2) {
  EXPECT_EQ(section(long_problem(MaskKind::kDense)), 1);
  EXPECT_EQ(section(long_problem(MaskKind::kBlockSparse)), 1);
}

TEST(BackwardSchedule, HasEightTilesEachUnderABand) {
  ForwardParams p = long_problem(MaskKind::kBand);
  EXPECT_EQ(section(p), 9);  // of 128 tiles: at least 8 · 132
  p.deterministic = true;
  EXPECT_EQ(section(p), 2);
}

TEST(BackwardSchedule, LeavesFiveHundredKeysOfAHeadAtWork) {
  ForwardParams p = long_problem(MaskKind::kBand);
  p.seqlen_q = p.seqlen_k = 2048;
  p.batch = 8;
  EXPECT_EQ(section(p), 33);
  EXPECT_EQ(section(p, 64), 16);
  p.seqlen_q = 256;  // of so few queries more heads fit
  EXPECT_EQ(section(p), 64);
}

TEST(BackwardSchedule, TakesNoTilesAndNoHeads) {
  for (MaskKind kind : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse}) {
    ForwardParams p = long_problem(kind);
    p.seqlen_k = 0;
    EXPECT_EQ(cuda::backward_schedule(p, kTileKeys, kElementBytes, kMultiprocessors).size(), 0);
    p.batch = 0;
    EXPECT_EQ(cuda::backward_schedule(p, kTileKeys, kElementBytes, kMultiprocessors).size(), 0);
  }
}

}  // namespace
}  // namespace flashsdk::testing
