// TileWalk alone: three runs, or two lists merged.
#include "common/tile_walk.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

namespace flashsdk {
namespace {

using Visit = std::pair<int, bool>;  // tile, partial

template <class Walk>
std::vector<Visit> visits(Walk walk) {
  std::vector<Visit> result;
  for (TileRef tile{}; walk.next(tile);) result.emplace_back(tile.index, tile.partial);
  return result;
}

TileWalk lists(const std::vector<int>& partial, const std::vector<int>& full, int split, int end) {
  return TileWalk::lists(partial.data(), static_cast<int>(partial.size()), full.data(), static_cast<int>(full.size()),
                         split, end);
}

std::vector<Visit> inside(const TileWalk& walk, int begin, int end) {
  std::vector<Visit> result;
  for (const Visit& visit : visits(walk))
    if (visit.first >= begin && visit.first < end) result.push_back(visit);
  return result;
}

TEST(TileWalkRuns, PartialFullPartial) {
  EXPECT_EQ(visits(TileWalk::runs(2, 4, 6, 7)),
            (std::vector<Visit>{{2, true}, {3, true}, {4, false}, {5, false}, {6, true}}));
}

TEST(TileWalkRuns, EachRunMayBeEmpty) {
  EXPECT_EQ(visits(TileWalk::runs(0, 0, 0, 0)), std::vector<Visit>{});
  EXPECT_EQ(visits(TileWalk::runs(3, 3, 3, 3)), std::vector<Visit>{});
  EXPECT_EQ(visits(TileWalk::runs(0, 0, 2, 2)), (std::vector<Visit>{{0, false}, {1, false}}));
  EXPECT_EQ(visits(TileWalk::runs(1, 1, 1, 3)), (std::vector<Visit>{{1, true}, {2, true}}));
  EXPECT_EQ(visits(TileWalk::runs(1, 2, 2, 2)), (std::vector<Visit>{{1, true}}));
}

TEST(TileWalkRuns, CountIsExact) {
  TileWalk walk = TileWalk::runs(5, 6, 8, 9);
  TileRef tile{};
  for (int left = 4; left > 0; --left) {
    EXPECT_EQ(walk.count(), left);
    EXPECT_TRUE(walk.next(tile));
  }
  EXPECT_EQ(walk.count(), 0);
  EXPECT_FALSE(walk.next(tile));
  EXPECT_FALSE(walk.next(tile));
}

TEST(TileWalkRuns, OutwardIsDownFromTheOriginAndThenUp) {
  const TileWalk walk = TileWalk::runs(2, 4, 6, 8);
  EXPECT_EQ(visits(OutwardWalk(walk, 4)),
            (std::vector<Visit>{{4, false}, {3, true}, {2, true}, {5, false}, {6, true}, {7, true}}));
  for (const TileWalk& runs :
       {walk, TileWalk::runs(0, 0, 0, 0), TileWalk::runs(7, 7, 8, 8), TileWalk::runs(3, 5, 60, 61)})
    for (int origin : {-5, 0, 2, 3, 7, 30, 60, 61, 1000}) {
      std::vector<Visit> outward = visits(OutwardWalk(runs, origin)), all = visits(runs);
      if (!all.empty()) {
        EXPECT_EQ(outward.front().first, std::clamp(origin, all.front().first, all.back().first));
      }
      std::sort(outward.begin(), outward.end());
      EXPECT_EQ(outward, all);
    }
}

TEST(TileWalkRuns, PartsAreTheWalkInPieces) {
  for (const TileWalk& walk : {TileWalk::runs(0, 0, 0, 0), TileWalk::runs(7, 7, 8, 8), TileWalk::runs(3, 5, 60, 61),
                               TileWalk::runs(2, 9, 9, 14)})
    for (int parts : {1, 2, 3, 5, 64, 128}) {
      std::vector<Visit> joined;
      for (int i = 0; i < parts; ++i) {
        const TileWalk part = walk.part(i, parts);
        EXPECT_EQ(part.count(), static_cast<int>(visits(part).size()));
        EXPECT_GE(part.count(), walk.count() / parts);
        EXPECT_LE(part.count(), walk.count() / parts + 1);
        for (const Visit& visit : visits(part)) joined.push_back(visit);
      }
      EXPECT_EQ(joined, visits(walk)) << parts;
    }
}

TEST(TileWalkRuns, BetweenIsWhatLiesThere) {
  for (const TileWalk& walk : {TileWalk::runs(0, 0, 0, 0), TileWalk::runs(2, 4, 6, 8), TileWalk::runs(3, 3, 9, 9)})
    for (int begin = 0; begin <= 10; ++begin)
      for (int end = begin; end <= 10; ++end) EXPECT_EQ(visits(walk.between(begin, end)), inside(walk, begin, end));
}

TEST(TileWalkLists, MergesInAscendingOrder) {
  EXPECT_EQ(visits(lists({1, 4}, {0, 2, 7}, 1, 8)),
            (std::vector<Visit>{{0, false}, {1, true}, {2, false}, {4, true}, {7, false}}));
}

TEST(TileWalkLists, EitherListMayBeEmpty) {
  EXPECT_EQ(visits(lists({}, {}, 2, 8)), std::vector<Visit>{});
  EXPECT_EQ(visits(lists({3}, {}, 1, 8)), (std::vector<Visit>{{3, true}}));
  EXPECT_EQ(visits(lists({}, {3}, 1, 8)), (std::vector<Visit>{{3, false}}));
}

TEST(TileWalkLists, CutsLayoutBlocksIntoTiles) {
  EXPECT_EQ(visits(lists({2}, {0}, 3, 9)),
            (std::vector<Visit>{{0, false}, {1, false}, {2, false}, {6, true}, {7, true}, {8, true}}));
}

TEST(TileWalkLists, CountIsExactInsideABlock) {
  const std::vector<int> partial{2}, full{0};
  TileWalk walk = lists(partial, full, 3, 9);
  TileRef tile{};
  for (int left = 6; left > 0; --left) {
    EXPECT_EQ(walk.count(), left);
    EXPECT_TRUE(walk.next(tile));
  }
  EXPECT_EQ(walk.count(), 0);
}

TEST(TileWalkLists, StopsAtTheSequenceEnd) {
  EXPECT_EQ(visits(lists({2}, {0}, 3, 7)), (std::vector<Visit>{{0, false}, {1, false}, {2, false}, {6, true}}));
  // A layout longer than the sequence, as short packed sequences see it.
  EXPECT_EQ(visits(lists({1, 3}, {0, 2}, 2, 3)), (std::vector<Visit>{{0, false}, {1, false}, {2, true}}));
}

TEST(TileWalkLists, OutwardIsAsTheyAre) {
  const std::vector<int> partial{2, 5}, full{0};
  EXPECT_EQ(visits(OutwardWalk(lists(partial, full, 2, 12), 5)), visits(lists(partial, full, 2, 12)));
}

TEST(TileWalkLists, RandomListsMatchASortedUnion) {
  std::mt19937 rng(1);
  for (int round = 0; round < 2000; ++round) {
    const int blocks = static_cast<int>(rng() % 12), split = 1 + static_cast<int>(rng() % 4);
    const int end = blocks == 0 ? 0 : blocks * split - static_cast<int>(rng() % split);
    std::vector<int> partial, full;
    std::vector<Visit> expected;
    for (int block = 0; block < blocks; ++block) {
      const int kind = static_cast<int>(rng() % 3);
      if (kind == 0) continue;
      (kind == 1 ? partial : full).push_back(block);
      for (int tile = block * split; tile < std::min((block + 1) * split, end); ++tile) {
        expected.emplace_back(tile, kind == 1);
      }
    }
    ASSERT_EQ(visits(lists(partial, full, split, end)), expected);
    const int excess = lists(partial, full, split, end).count() - static_cast<int>(expected.size());
    ASSERT_GE(excess, 0);
    ASSERT_LT(excess, split);
    const int first = static_cast<int>(rng() % (end + 1)), last = static_cast<int>(rng() % (end + 3));
    const TileWalk walk = lists(partial, full, split, end);
    ASSERT_EQ(visits(walk.between(first, last)), inside(walk, first, last)) << first << " to " << last;
  }
}

}  // namespace
}  // namespace flashsdk
