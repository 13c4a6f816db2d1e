// Checks a mask policy against brute force: what its walks visit, what it calls full, and what it allows inside.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/mask_policy.h"

namespace flashsdk::testing {

// What the policy under test should do, said independently of it.
template <class Visible>
struct PolicyCheck {
  int seqlen_q, seqlen_k;
  Tile tile;
  Visible visible;  // bool(i, j): whether query i sees key j
  int split_m = 1;  // tiles per layout block: how far count() may exceed what is still to come
  int split_n = 1;
  bool exact = true;     // every visited tile holds a visible element, every tile seen throughout is called full
  std::string describe;  // names the case in failures
};

// The tiles of one walk. Ascending order, rank_of() and count() are checked while walking.
inline std::vector<TileRef> collect(TileWalk walk, int slack, int end, const std::string& where) {
  std::vector<TileRef> tiles;
  std::vector<int> counts{walk.count()};
  const TileWalk start = walk;
  TileRef ref{};
  while (walk.next(ref)) {
    EXPECT_EQ(start.rank_of(ref.index), static_cast<int>(tiles.size())) << where << ": rank_of";
    EXPECT_GE(ref.index, tiles.empty() ? 0 : tiles.back().index + 1) << where << ": not ascending";
    EXPECT_LT(ref.index, end) << where << ": past the sequence";
    tiles.push_back(ref);
    counts.push_back(walk.count());
    if (static_cast<int>(tiles.size()) > end) {
      ADD_FAILURE() << where << ": the walk does not end";
      break;
    }
  }
  TileRef ignored{};
  EXPECT_FALSE(walk.next(ignored)) << where << ": walks on after its end";
  for (std::size_t step = 0; step < counts.size(); ++step) {
    int left = static_cast<int>(tiles.size() - step);
    EXPECT_GE(counts[step], left) << where << ": count() is below what still comes";
    EXPECT_LT(counts[step] - left, slack) << where << ": count() is too loose";
  }
  return tiles;
}

template <class Policy, class Visible>
void check_policy(const Policy& policy, const PolicyCheck<Visible>& c) {
  const int m_blocks = ceil_div(c.seqlen_q, c.tile.m), n_blocks = ceil_div(c.seqlen_k, c.tile.n);
  std::ostringstream text;
  text << c.describe << " seqlen_q=" << c.seqlen_q << " seqlen_k=" << c.seqlen_k << " tile=" << c.tile.m << "x"
       << c.tile.n;
  const std::string name = text.str();

  // (m_block, n_block) -> partial, as each direction tells it.
  std::map<std::pair<int, int>, bool> by_row, by_col;
  for (int m = 0; m < m_blocks; ++m) {
    for (TileRef t : collect(policy.row_walk(c.tile, m), c.split_n, n_blocks, name + " row " + std::to_string(m))) {
      by_row[{m, t.index}] = t.partial;
    }
  }
  for (int n = 0; n < n_blocks; ++n) {
    for (TileRef t : collect(policy.col_walk(c.tile, n), c.split_m, m_blocks, name + " col " + std::to_string(n))) {
      by_col[{t.index, n}] = t.partial;
    }
  }
  EXPECT_EQ(by_row, by_col) << name << ": the column walk is not the row walk transposed";

  for (int m = 0; m < m_blocks; ++m) {
    for (int n = 0; n < n_blocks; ++n) {
      const int i_end = min_of((m + 1) * c.tile.m, c.seqlen_q), j_end = min_of((n + 1) * c.tile.n, c.seqlen_k);
      auto found = by_row.find({m, n});
      const bool visited = found != by_row.end(), partial = visited && found->second;
      bool any = false, all = true, allowed_agrees = true, keys_agree = true, diagonals_agree = true;
      for (int i = m * c.tile.m; i < i_end; ++i) {
        [[maybe_unused]] KeyRange keys{};
        if constexpr (kHasKeyRange<Policy>) keys = policy.keys_of(i);
        for (int j = n * c.tile.n; j < j_end; ++j) {
          const bool see = c.visible(i, j);
          any |= see;
          all &= see;
          allowed_agrees &= policy.allowed(i, j) == see;
          if constexpr (kHasKeyRange<Policy>) keys_agree &= (keys.begin <= j && j < keys.end) == see;
          if constexpr (kHasDiagonals<Policy>) {
            const KeyRange diagonals = policy.diagonals();
            diagonals_agree &= (diagonals.begin <= j - i && j - i < diagonals.end) == see;
          }
        }
      }
      const std::string where = name + " tile (" + std::to_string(m) + ", " + std::to_string(n) + ")";
      if (!visited) {
        EXPECT_FALSE(any) << where << ": visible but not visited";
      } else if (partial) {
        EXPECT_TRUE(allowed_agrees) << where << ": allowed() is wrong";
        EXPECT_TRUE(keys_agree) << where << ": keys_of() is not the interval of allowed()";
        EXPECT_TRUE(diagonals_agree) << where << ": diagonals() are not those of allowed()";
        EXPECT_FALSE(c.exact && all) << where << ": seen throughout, but called partial";
      } else {
        EXPECT_TRUE(all) << where << ": called full, but some element is hidden";
      }
      EXPECT_FALSE(c.exact && visited && !any) << where << ": visited, but nothing is visible";
    }
  }
}

}  // namespace flashsdk::testing
