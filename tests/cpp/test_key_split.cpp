// Into how many parts the keys of few queries are split, and where the parts leave what they have found.
#include "sm80/key_split.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace flashsdk::sm80 {
namespace {

constexpr int kMultiprocessors = 132, kBlocksEach = 2;
constexpr Tile kTile{64, 64};

int parts_of(std::int64_t query_tiles, int key_tiles) {
  return key_parts(query_tiles, key_tiles * kTile.n, kTile.n, kMultiprocessors, kBlocksEach);
}

ForwardParams problem(int seqlen_q, int seqlen_k) {
  ForwardParams p;
  p.batch = 2;
  p.num_heads = p.num_heads_kv = 4;
  p.head_dim = p.head_dim_v = 128;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  return p;
}

int parts_of(const ForwardParams& p) {
  return key_parts(p, heads_sharing(p), kTile, kMultiprocessors, kBlocksEach);
}

TEST(KeyParts, NoneWhereThereIsNothingToSplit) {
  EXPECT_EQ(parts_of(0, 1000), 1);
  EXPECT_EQ(parts_of(8, 0), 1);
  EXPECT_EQ(parts_of(8, 1), 1);
  EXPECT_EQ(parts_of(8, 8), 1);      // a second kernel costs more than it saves
  EXPECT_EQ(parts_of(67, 1000), 1);  // every other multiprocessor has work
}

TEST(KeyParts, AllThreadBlocksRunAtOnce) {
  for (std::int64_t tiles = 1; tiles <= 66; ++tiles)
    for (int keys : {16, 100, 1000, 100000}) {
      const int parts = parts_of(tiles, keys);
      EXPECT_LE(tiles * parts, kMultiprocessors * kBlocksEach) << tiles << " " << keys;
      EXPECT_LE(parts, keys);
      EXPECT_GE(parts, keys >= 100 ? 2 : 1) << tiles << " " << keys;
    }
}

TEST(KeyParts, AsMeasured) {  // benchmarks/results/sm80_key_parts.csv, sm80_join.csv
  EXPECT_EQ(parts_of(8, 32), 16);
  EXPECT_EQ(parts_of(8, 256), 32);
  EXPECT_EQ(parts_of(64, 128), 4);
  EXPECT_EQ(parts_of(1, 1024), 128);
  EXPECT_EQ(key_parts(16, 4096, 128, kMultiprocessors, kBlocksEach), 8);
  EXPECT_EQ(key_parts(16, 16384, 128, kMultiprocessors, kBlocksEach), 16);
}

TEST(KeyParts, ABandLeavesFewKeys) {
  ForwardParams p = problem(1, 1 << 20);
  EXPECT_GT(parts_of(p), 1);
  p.mask.kind = MaskKind::kBand;
  p.mask.band.right = 0;
  EXPECT_GT(parts_of(p), 1);
  p.mask.band.left = 256;
  EXPECT_EQ(parts_of(p), 1);
  p.mask.band.left = -100;
  EXPECT_EQ(parts_of(p), 1);
  p.mask.band.right = BandParam::kUnlimited;
  EXPECT_GT(parts_of(p), 1);
}

TEST(KeyParts, AsManyAsAreAskedFor) {
  ForwardParams p = problem(1, 1 << 20);
  const int most = parts_of(p);
  EXPECT_GT(most, 4);
  for (int splits : {1, 2, 4}) {
    p.num_splits = splits;
    EXPECT_EQ(parts_of(p), splits);
  }
  p.num_splits = 1000;
  EXPECT_EQ(parts_of(p), most);
}

TEST(SharedRows, FewQueriesOfGroupedHeads) {
  ForwardParams p = problem(8, 4096);
  EXPECT_EQ(heads_sharing(p), 1);  // no group
  p.num_heads = 16;
  EXPECT_EQ(heads_sharing(p), 4);
  p.mask.kind = MaskKind::kBand;
  p.score.softcap = 3.f;
  EXPECT_EQ(heads_sharing(p), 4);
  const ForwardParams shared = p;
  p.seqlen_q = 33;  // more than 128 rows
  EXPECT_EQ(heads_sharing(p), 1);
  p = shared;
  p.seqlen_k = 500;
  EXPECT_EQ(heads_sharing(p), 1);
  p = shared;
  p.mask.kind = MaskKind::kBlockSparse;
  EXPECT_EQ(heads_sharing(p), 1);
  const float slopes[16] = {};
  p = shared;
  p.score.alibi_slopes = slopes;
  EXPECT_EQ(heads_sharing(p), 1);
  p = shared;
  p.score.dropout.threshold = 5;
  EXPECT_EQ(heads_sharing(p), 1);
}

// Each query of each head is one row of one tile head.
TEST(SharedRows, EachIsOneQueryOfOneHead) {
  const SharedRows shared{3};
  std::set<std::pair<int, int>> seen;
  for (int tile_head = 0; tile_head < 2; ++tile_head)
    for (int row = 0; row < 5 * shared.heads; ++row)
      EXPECT_TRUE(seen.insert({shared.head(tile_head, row), shared.query(row)}).second);
  for (int head = 0; head < 6; ++head)
    for (int query = 0; query < 5; ++query) EXPECT_EQ(seen.count({head, query}), 1u);
}

TEST(KeySplit, HeadsThatShareTakeNoMorePlaces) {
  ForwardParams p = problem(5, 1000);
  p.num_heads = 8;
  const KeySplit split(p, 3, nullptr);
  EXPECT_EQ(split.heads, 4);
  EXPECT_EQ(split.rows_of_head, 10);
  EXPECT_EQ(split.rows, std::int64_t{p.batch} * p.num_heads * p.seqlen_q);
}

TEST(KeySplit, EveryRowOfEveryPartHasAPlaceOfItsOwn) {
  const ForwardParams p = problem(5, 1000);
  const KeySplit split(p, 3, nullptr);
  std::set<std::int64_t> seen;
  for (int part = 0; part < 3; ++part)
    for (int batch = 0; batch < p.batch; ++batch)
      for (int head = 0; head < p.num_heads; ++head)
        for (int query = 0; query < p.seqlen_q; ++query) {
          const std::int64_t place = split.row(part, batch, head, query);
          EXPECT_TRUE(place >= part * split.rows && place < (part + 1) * split.rows);
          EXPECT_TRUE(seen.insert(place).second);
        }
  EXPECT_EQ(split.size(), seen.size() * (p.head_dim_v + 2) * sizeof(float));
}

// Buffers may be longer than what is in them.
TEST(KeySplit, RowsBehindPackedSequencesTakeNoMemory) {
  ForwardParams p = problem(1, 5000);
  const std::size_t batched = KeySplit(p, 4, nullptr).size();
  const std::int32_t ends[] = {0, 1, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = ends;
  p.total_q = 1 << 20;
  EXPECT_EQ(KeySplit(p, 4, nullptr).size(), batched);
}

}  // namespace
}  // namespace flashsdk::sm80
