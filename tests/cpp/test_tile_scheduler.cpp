// The order in which thread blocks take tiles (cuda/schedule/tile_scheduler.h), as the host plans it.
#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <utility>

#include "cuda/schedule/tile_scheduler.h"
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

TEST(BackwardSchedule, TakesEveryTileOnce) {
  Rng rng(2);
  for (int round = 0; round < 500; ++round) {
    const int heads = between(rng, 1, 9), batch = between(rng, 1, 9), last = between(rng, 1, heads * batch);
    const cuda::BackwardSchedule schedule{
        {between(rng, 1, 40), heads, heads * batch - last, between(rng, 1, 50), between(rng, 0, 1) == 1}, last};
    EXPECT_EQ(schedule.size(), std::int64_t{schedule.sections.num_blocks} * heads * batch);
    std::set<std::tuple<int, int, int>> taken;
    for (int index = 0; index < schedule.size(); ++index) {
      const cuda::TileWork work = schedule.work(index);
      EXPECT_TRUE(work.block >= 0 && work.block < schedule.sections.num_blocks && work.head < heads &&
                  work.batch < batch);
      EXPECT_TRUE(taken.emplace(work.block, work.head, work.batch).second) << "round " << round << " index " << index;
    }
  }
}

// 16384 tokens of 16 heads of 128, as sequences of one length: Q, dO and dQ of a token and head take 1 KiB.
ForwardParams problem(MaskKind kind, int seqlen) {
  ForwardParams p{};
  p.batch = 16384 / seqlen;
  p.num_heads = p.num_heads_kv = 16;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.head_dim = p.head_dim_v = 128;
  p.mask.kind = kind;
  return p;
}
constexpr int kTileKeys = 128, kElementBytes = 2;
constexpr cuda::Workers kH100{50 << 20, 132}, kPairs{50 << 20, 66}, kSmallL2{6 << 20, 132};
using Widths = std::pair<int, int>;  // of a section, of the last one
Widths widths(const ForwardParams& p, cuda::Workers workers = kH100) {
  const cuda::BackwardSchedule schedule = cuda::backward_schedule(p, kTileKeys, kElementBytes, workers);
  return {schedule.sections.section, schedule.last_width};
}

// A head of 16K tokens takes 16 MiB, of 33 in a section and 66 in the last one.
TEST(BackwardSchedule, KeepsASectionInL2UnderABand) {
  EXPECT_EQ(widths(problem(MaskKind::kBand, 16384)), Widths(2, 4));
  EXPECT_EQ(widths(problem(MaskKind::kBand, 8192)), Widths(4, 8));
  EXPECT_EQ(widths(problem(MaskKind::kBand, 4096)), Widths(8, 16));
  EXPECT_EQ(widths(problem(MaskKind::kBand, 16384), kSmallL2), Widths(1, 1));  // a head is more than it holds
}

TEST(BackwardSchedule, HasFourTilesEachInTheLastSection) {
  EXPECT_EQ(widths(problem(MaskKind::kBand, 2048)), Widths(16, 33));          // of 16 tiles each for 132 workers
  EXPECT_EQ(widths(problem(MaskKind::kBand, 2048), kPairs), Widths(16, 17));  // for 66
  EXPECT_EQ(widths(problem(MaskKind::kBand, 1024)), Widths(33, 33));          // eight key tiles use a query too seldom
}

TEST(BackwardSchedule, TakesHeadAfterHeadWithoutAMask) {
  EXPECT_EQ(widths(problem(MaskKind::kDense, 4096)), Widths(1, 1));
  EXPECT_EQ(widths(problem(MaskKind::kBlockSparse, 4096)), Widths(4, 4));
}

TEST(BackwardSchedule, CountsHeadsOfAGroupOnce) {
  ForwardParams p = problem(MaskKind::kBand, 4096);
  p.num_heads_kv = 4;
  EXPECT_EQ(widths(p), Widths(8, 16));  // all that there are
}

TEST(BackwardSchedule, QueuesInTurnsInSectionsOfOneWidth) {
  ForwardParams p = problem(MaskKind::kBand, 8192);
  p.deterministic = true;
  EXPECT_EQ(widths(p), Widths(4, 4));
  p.mask.kind = MaskKind::kDense;
  EXPECT_EQ(widths(p), Widths(4, 4));
}

TEST(BackwardSchedule, TakesNoTilesAndNoHeads) {
  for (MaskKind kind : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse}) {
    ForwardParams p = problem(kind, 16384);
    p.seqlen_k = 0;
    EXPECT_EQ(cuda::backward_schedule(p, kTileKeys, kElementBytes, kH100).size(), 0);
    p.batch = 0;
    EXPECT_EQ(cuda::backward_schedule(p, kTileKeys, kElementBytes, kH100).size(), 0);
  }
}

}  // namespace
}  // namespace flashsdk::testing
