// Dense, Band and BlockSparse against brute force over random shapes.
#include "common/mask_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "block_lists.h"
#include "policy_check.h"
#include "rng.h"

namespace flashsdk::testing {
namespace {

template <class T>
T pick(Rng& rng, std::initializer_list<T> values) {
  return values.begin()[between(rng, 0, static_cast<int>(values.size()) - 1)];
}

SeqlenInfo sequence(int seqlen_q, int seqlen_k) {
  ForwardParams p;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  return SeqlenInfo(p, 0);
}

// The definition of docs/semantics.md.
bool band_sees(const BandParam& band, int seqlen_q, int seqlen_k, int i, int j) {
  const std::int64_t shift = band.top_left ? 0 : std::int64_t{seqlen_k} - seqlen_q;
  const std::int64_t distance = j - (i + shift);
  return -band.left <= distance && distance <= band.right;
}

BandParam random_band(Rng& rng, int reach) {
  BandParam band;
  // Unlimited, zero (causal and its mirror), negative, and beyond either end all occur often.
  band.left = pick(rng, {0, 1, 1}) == 0 ? BandParam::kUnlimited : std::int64_t{between(rng, -reach, reach)};
  band.right = pick(rng, {0, 1, 1}) == 0 ? BandParam::kUnlimited : std::int64_t{between(rng, -reach, reach)};
  if (between(rng, 0, 3) == 0) band.right = 0;
  band.top_left = between(rng, 0, 1) == 1;
  return band;
}

std::string describe(const BandParam& band) {
  auto number = [](std::int64_t x) { return x == BandParam::kUnlimited ? "inf" : std::to_string(x); };
  return "band left=" + number(band.left) + " right=" + number(band.right) +
         (band.top_left ? " top_left" : " bottom_right");
}

TEST(DensePolicy, RandomShapes) {
  Rng rng(1);
  for (int round = 0; round < 1000 && !::testing::Test::HasFailure(); ++round) {
    const int seqlen_q = between(rng, 0, 80), seqlen_k = between(rng, 0, 80);
    const Tile tile{between(rng, 1, 40), between(rng, 1, 40)};
    const DensePolicy policy(MaskParam{}, sequence(seqlen_q, seqlen_k), 0, 0);
    auto visible = [](int, int) { return true; };
    check_policy(policy, PolicyCheck<decltype(visible)>{seqlen_q, seqlen_k, tile, visible, 1, 1, true, "dense"});
  }
}

TEST(BandPolicy, RandomShapes) {
  Rng rng(2);
  for (int round = 0; round < 8000 && !::testing::Test::HasFailure(); ++round) {
    const int seqlen_q = between(rng, 0, 70), seqlen_k = pick(rng, {seqlen_q, between(rng, 0, 70)});
    const Tile tile{between(rng, 1, 32), between(rng, 1, 32)};
    MaskParam mask;
    mask.kind = MaskKind::kBand;
    mask.band = random_band(rng, pick(rng, {3, 20, 100}));
    const BandPolicy policy(mask, sequence(seqlen_q, seqlen_k), 0, 0);
    auto visible = [&](int i, int j) { return band_sees(mask.band, seqlen_q, seqlen_k, i, j); };
    check_policy(policy,
                 PolicyCheck<decltype(visible)>{seqlen_q, seqlen_k, tile, visible, 1, 1, true, describe(mask.band)});
  }
}

// As a policy of a user's own may be: it tells neither an interval nor diagonals, and calls no tile full.
class EveryOtherKey {
 public:
  static constexpr MaskKind kKind = MaskKind::kBand;
  explicit EveryOtherKey(const SeqlenInfo& s) : seqlen_q_(s.seqlen_q), seqlen_k_(s.seqlen_k) {}
  TileWalk row_walk(Tile tile, int) const { return all(ceil_div(seqlen_k_, tile.n)); }
  TileWalk col_walk(Tile tile, int) const { return all(ceil_div(seqlen_q_, tile.m)); }
  bool allowed(int i, int j) const { return (i + j) % 2 == 0; }

 private:
  static TileWalk all(int tiles) { return TileWalk::runs(0, tiles, tiles, tiles); }
  int seqlen_q_, seqlen_k_;
};

TEST(OwnPolicy, RandomShapes) {
  static_assert(!kHasKeyRange<EveryOtherKey> && !kHasDiagonals<EveryOtherKey>);
  Rng rng(5);
  for (int round = 0; round < 1000 && !::testing::Test::HasFailure(); ++round) {
    const int seqlen_q = between(rng, 1, 80), seqlen_k = between(rng, 1, 80);
    const Tile tile{between(rng, 1, 40), between(rng, 1, 40)};
    const EveryOtherKey policy(sequence(seqlen_q, seqlen_k));
    auto visible = [](int i, int j) { return (i + j) % 2 == 0; };
    check_policy(policy, PolicyCheck<decltype(visible)>{seqlen_q, seqlen_k, tile, visible, 1, 1, false, "own"});
  }
}

// As where tiles of queries are counted from the end of a sequence: the first may begin before it.
TEST(BandPolicy, WalksFromAnyQuery) {
  Rng rng(5);
  for (int round = 0; round < 8000 && !::testing::Test::HasFailure(); ++round) {
    const int seqlen_q = between(rng, 1, 70), seqlen_k = pick(rng, {seqlen_q, between(rng, 0, 70)});
    const Tile tile{between(rng, 1, 32), between(rng, 1, 32)};
    const int first = between(rng, 1 - tile.m, seqlen_q - 1);
    MaskParam mask;
    mask.kind = MaskKind::kBand;
    mask.band = random_band(rng, pick(rng, {3, 20, 100}));
    const BandPolicy policy(mask, sequence(seqlen_q, seqlen_k), 0, 0);
    const std::string name = describe(mask.band) + " seqlen_q=" + std::to_string(seqlen_q) +
                             " seqlen_k=" + std::to_string(seqlen_k) + " tile=" + std::to_string(tile.m) + "x" +
                             std::to_string(tile.n) + " first=" + std::to_string(first);
    const int tiles = ceil_div(seqlen_k, tile.n);
    std::vector<bool> visited(tiles), partial(tiles);
    const TileWalk walk = policy.row_walk_from(tile, first);
    for (TileRef t : collect(walk, 1, tiles, name)) {
      visited[t.index] = true;
      partial[t.index] = t.partial;
    }
    int first_full = -1;
    std::vector<bool> shows_first_key(tiles);  // to all queries
    for (int n = 0; n < tiles; ++n) {
      bool any = false, all = true, first_key = true;
      for (int i = max_of(first, 0); i < min_of(first + tile.m, seqlen_q); ++i) {
        for (int j = n * tile.n; j < min_of((n + 1) * tile.n, seqlen_k); ++j) {
          const bool sees = band_sees(mask.band, seqlen_q, seqlen_k, i, j);
          any |= sees;
          all &= sees;
          first_key &= sees || j > n * tile.n;
        }
      }
      if (all && first_full < 0) first_full = n;
      shows_first_key[n] = first_key;
      EXPECT_EQ(bool{visited[n]}, any) << name << " tile " << n;
      EXPECT_EQ(visited[n] && partial[n], any && !all) << name << " tile " << n;
    }
    TileRef origin{};
    const bool visits = std::find(visited.begin(), visited.end(), true) != visited.end();
    ASSERT_EQ((OutwardWalk(walk, walk.full_begin()).next(origin)), visits) << name;
    if (!visits) continue;
    if (first_full >= 0) {
      EXPECT_EQ(origin.index, first_full) << name;
    }
    const bool any_shows = std::find(shows_first_key.begin(), shows_first_key.end(), true) != shows_first_key.end();
    EXPECT_EQ(bool{shows_first_key[origin.index]}, any_shows) << name;
    int last_shown = origin.index;  // where none is, both begin with the same
    for (int n = 0; n < tiles; ++n)
      if (visited[n] && shows_first_key[n]) last_shown = n;
    OutwardWalk from_last(walk, last_tile_begun_by_all(walk, policy.diagonals(), first, tile.n));
    ASSERT_TRUE(from_last.next(origin)) << name;
    EXPECT_EQ(origin.index, last_shown) << name;
  }
}

TEST(BandPolicy, SequencesNearTheIndexLimitDoNotOverflow) {
  // 2^31 - 1 rows cannot be walked in a test; the ends of the walks and of the intervals can.
  const int longest = 2147483647 - 128;
  MaskParam mask;
  mask.band.right = 0;
  for (bool top_left : {false, true}) {
    mask.band.top_left = top_left;
    const BandPolicy policy(mask, sequence(longest, longest), 0, 0);
    const Tile tile{128, 128};
    const int last = ceil_div(longest, 128) - 1;
    EXPECT_EQ(policy.row_walk(tile, last).count(), last + 1);
    EXPECT_EQ(policy.col_walk(tile, 0).count(), last + 1);
    EXPECT_EQ(policy.keys_of(longest - 1).end, longest);
    EXPECT_TRUE(policy.allowed(longest - 1, longest - 1));
    EXPECT_FALSE(policy.allowed(longest - 2, longest - 1));
  }
}

struct SparseCase {
  int block_q, block_k, split_m, split_n;  // tile = block / split
  int seqlen_q, seqlen_k;
  std::vector<Layout> layouts;
  bool per_batch, per_head;
  BandParam band;
};

SparseCase random_sparse(Rng& rng, int batch, int heads) {
  SparseCase c;
  c.split_m = between(rng, 1, 4);
  c.split_n = between(rng, 1, 4);
  c.block_q = c.split_m * between(rng, 1, 8);
  c.block_k = c.split_n * between(rng, 1, 8);
  c.seqlen_q = between(rng, 0, 60);
  c.seqlen_k = between(rng, 0, 60);
  c.per_batch = between(rng, 0, 1) == 1;
  c.per_head = between(rng, 0, 1) == 1;
  c.band = random_band(rng, 30);
  const int density = between(rng, 0, 100);
  const int rows = ceil_div(c.seqlen_q, c.block_q), cols = ceil_div(c.seqlen_k, c.block_k);
  for (int n = 0; n < (c.per_batch ? batch : 1) * (c.per_head ? heads : 1); ++n) {
    Layout layout{rows, cols, {}};
    for (int b = 0; b < rows * cols; ++b) {
      layout.kind.push_back(between(rng, 0, 99) >= density ? 0 : between(rng, 1, 2));
    }
    c.layouts.push_back(layout);
  }
  return c;
}

TEST(BlockSparsePolicy, RandomLayouts) {
  constexpr int kBatch = 2, kHeads = 3;
  Rng rng(3);
  for (int round = 0; round < 1500 && !::testing::Test::HasFailure(); ++round) {
    const SparseCase c = random_sparse(rng, kBatch, kHeads);
    const MaskLists lists(c.layouts);
    const int head_step = c.per_head ? 1 : 0, batch_step = c.per_batch ? (c.per_head ? kHeads : 1) : 0;
    MaskParam mask;
    mask.band = c.band;
    mask.block_q = c.block_q;
    mask.block_k = c.block_k;
    lists.put_into(mask, batch_step, head_step);
    const Tile tile{c.block_q / c.split_m, c.block_k / c.split_n};

    for (int batch = 0; batch < kBatch; ++batch) {
      for (int head = 0; head < kHeads; ++head) {
        const Layout& layout = c.layouts[batch * batch_step + head * head_step];
        auto visible = [&](int i, int j) {
          const int kind = layout.at(i / c.block_q, j / c.block_k);
          return kind == 1 || (kind == 2 && band_sees(c.band, c.seqlen_q, c.seqlen_k, i, j));
        };
        const BlockSparsePolicy policy(mask, sequence(c.seqlen_q, c.seqlen_k), batch, head);
        // Not exact: the layout decides what is visited, and a listed partial block may be empty or seen throughout.
        check_policy(policy, PolicyCheck<decltype(visible)>{c.seqlen_q, c.seqlen_k, tile, visible, c.split_m, c.split_n,
                                                            false, "block sparse, " + describe(c.band)});
      }
    }
  }
}

TEST(BlockSparsePolicy, PackedSequencesShorterThanTheLayout) {
  // One layout of 6 x 6 blocks of 16 serves sequences of every length up to 96.
  Layout layout{6, 6, {}};
  Rng rng(4);
  for (int b = 0; b < 36; ++b) layout.kind.push_back(between(rng, 0, 2));
  const MaskLists lists({layout});
  MaskParam mask;
  mask.band.right = 0;
  mask.block_q = mask.block_k = 16;
  lists.put_into(mask, 0, 0);
  for (int seqlen_q = 0; seqlen_q <= 96; seqlen_q += 7) {
    for (int seqlen_k = 0; seqlen_k <= 96; seqlen_k += 5) {
      auto visible = [&](int i, int j) {
        const int kind = layout.at(i / 16, j / 16);
        return kind == 1 || (kind == 2 && band_sees(mask.band, seqlen_q, seqlen_k, i, j));
      };
      const BlockSparsePolicy policy(mask, sequence(seqlen_q, seqlen_k), 0, 0);
      // count() cannot know how many listed blocks lie past a short sequence.
      check_policy(policy,
                   PolicyCheck<decltype(visible)>{seqlen_q, seqlen_k, {8, 16}, visible, 97, 97, false, "packed"});
    }
  }
}

}  // namespace
}  // namespace flashsdk::testing
