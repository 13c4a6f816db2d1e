// Into how many parts the keys of few queries are split, and where the parts leave what they have found.
#include "sm80/key_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

namespace flashsdk::sm80 {
namespace {

constexpr int kMultiprocessors = 132, kBlocksEach = 2;
constexpr SplitDevice kDevice{kMultiprocessors, kBlocksEach};  // an H100
constexpr SplitDevice kFewRowsDevice{kMultiprocessors, 3};
constexpr Tile kTile{64, 64};

int parts_of(std::int64_t query_tiles, int key_tiles) {
  return key_parts(query_tiles, key_tiles * kTile.n, kTile.n, kDevice);
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

KeyParts key_parts_of(const ForwardParams& p) { return key_parts(p, heads_sharing(p), kTile, kDevice); }
int parts_of(const ForwardParams& p) { return key_parts_of(p).most; }

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
  EXPECT_EQ(key_parts(16, 4096, 128, kDevice), 8);
  EXPECT_EQ(key_parts(16, 16384, 128, kDevice), 16);
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
  p.seqlen_q = 0;
  EXPECT_EQ(heads_sharing(p), 1);
  p = shared;
  p.batch = 0;
  EXPECT_EQ(heads_sharing(p), 1);
  p.batch = 257;  // of 4 heads of keys
  EXPECT_EQ(heads_sharing(p), 1);
  p = shared;
  p.seqlen_q = 32;  // 128 rows
  p.seqlen_k = 2048;
  EXPECT_EQ(heads_sharing(p), 4);
  p.seqlen_k = 2047;
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

TEST(FewRows, OfManyKeysAreTakenHoweverManyThereAre) {
  ForwardParams p = problem(1, 512);
  EXPECT_TRUE(has_few_rows(p, 1));
  p.batch = 10000;
  EXPECT_TRUE(has_few_rows(p, 1));
  p.seqlen_k = 511;
  EXPECT_FALSE(has_few_rows(p, 1));
  p = problem(4, 512);
  EXPECT_TRUE(has_few_rows(p, 4));  // a tile
  EXPECT_FALSE(has_few_rows(p, 5));
  p.seqlen_q = 0;
  EXPECT_FALSE(has_few_rows(p, 1));
}

TEST(FewRows, OfFp8KeysAreTakenHoweverManyThereAre) {
  ForwardParams p = problem(1, 100);
  EXPECT_FALSE(has_few_rows(p, 1));  // those of 16 bits have others beside them
  p.dtype_kv = DType::kFloat8E4M3;
  EXPECT_TRUE(has_few_rows(p, 1));
  p.batch = 10000;
  EXPECT_TRUE(has_few_rows(p, 1));
  p.batch = kMostSplitTiles / 4 + 1;  // of 4 heads: the second kernel's grid has no place for them
  EXPECT_FALSE(has_few_rows(p, 1));
  p.batch = 0;
  EXPECT_FALSE(has_few_rows(p, 1));
  p = problem(kFewRows, 100);
  p.dtype_kv = DType::kFloat8E4M3;
  EXPECT_TRUE(has_few_rows(p, 1));
  EXPECT_FALSE(has_few_rows(p, 2));
  p.seqlen_q = kFewRows + 1;
  EXPECT_FALSE(has_few_rows(p, 1));
  p.seqlen_q = 0;
  EXPECT_FALSE(has_few_rows(p, 1));
}

TEST(ManyRows, OfFp8KeysSplitTheseWhereThereAreFewTiles) {
  const auto parts_of = [](int query_tiles, int keys) {
    return fp8_key_parts(Fp8Costs(query_tiles * 128, 128, 32), query_tiles, keys, 32, kDevice);
  };
  EXPECT_EQ(parts_of(264, 16384), 1);  // as many as run at once
  EXPECT_EQ(parts_of(32, 64), 1);      // a second kernel would take longer
  EXPECT_GE(parts_of(32, 16384), 4);
  EXPECT_LE(parts_of(32, 16384), 8);  // what parts leave is read again
}

TEST(ManyRows, OfFp8KeysStayWholeWhereTheDeviceIsFull) {
  ForwardParams p = problem(128 * 33, 1 << 20);
  p.dtype_kv = DType::kFloat8E4M3;
  p.num_heads = p.num_heads_kv = 8;
  p.batch = 1;
  const auto parts_of = [&] { return key_parts(p, heads_sharing(p), Tile{128, 32}, kDevice).most; };
  EXPECT_EQ(parts_of(), 1);  // 264 tiles
  p.seqlen_q = 128 * 8;
  EXPECT_GT(parts_of(), 1);
  p.num_heads = p.num_heads_kv = kMostSplitTiles + 1;
  p.seqlen_q = 1;
  EXPECT_EQ(parts_of(), 1);
}

TEST(ManyRows, OfFp8KeysShareATileWhereWholeVectorsAreWritten) {
  ForwardParams p = problem(4, 4096);
  p.num_heads = 16;
  p.dtype_kv = DType::kFloat8E4M3;
  EXPECT_EQ(heads_sharing(p), 4);
  p.head_dim = p.head_dim_v = 7;
  EXPECT_EQ(heads_sharing(p), 1);
  p.head_dim = p.head_dim_v = 8;
  EXPECT_EQ(heads_sharing(p), 4);
  p.out.ptr = reinterpret_cast<void*>(2);
  EXPECT_EQ(heads_sharing(p), 1);
}

TEST(FewRows, SharingHeadsMayBeMany) {
  ForwardParams p = problem(5, 4096);
  p.num_heads = 16;
  p.batch = 257;
  EXPECT_EQ(heads_sharing(p), 1);
  p.seqlen_q = 4;  // 16 rows
  EXPECT_EQ(heads_sharing(p), 4);
  p.dtype_kv = DType::kFloat8E4M3;
  EXPECT_EQ(heads_sharing(p), 4);
  p.batch = kMostSplitTiles / 4 + 1;
  EXPECT_EQ(heads_sharing(p), 1);
}

TEST(FewRows, PartsAsMeasured) {  // benchmarks/results/sm80_few_rows.csv and sm80_few_rows_16_bits.csv
  const auto parts = [](int query_tiles, int key_tiles, SplitDevice device = kFewRowsDevice) {
    return few_rows_parts(FewRowsCosts(device), query_tiles, key_tiles * 128, 128);
  };
  EXPECT_EQ(parts(8, 0), 1);
  EXPECT_EQ(parts(8, 1), 1);
  EXPECT_EQ(parts(8, 8), 8);
  EXPECT_EQ(parts(8, 16), 16);
  // A thread block for each multiprocessor reads as fast as more of them would.
  EXPECT_EQ(parts(128, 512), 1);
  EXPECT_EQ(parts(32, 32), 4);
  EXPECT_EQ(parts(kFewRowsDevice.slots(), 64), 1);  // all run at once, and end at once
  // An H200 reads faster than the last 116 of 512 thread blocks alone ask for.
  const SplitDevice faster{kMultiprocessors, 3, 4916};
  EXPECT_EQ(parts(512, 64), 1);
  EXPECT_GT(parts(512, 64, faster), 1);
  for (int tiles : {1, 8, 100, 1000, 60000})
    for (int keys : {1, 7, 100, 1000}) EXPECT_LE(parts(tiles, keys), std::min(keys, kMostKeyParts));
}

TEST(FewRows, TakeLongerWhereTheirLastTurnIsUneven) {
  const FewRowsCosts costs(kFewRowsDevice);
  const auto time = [&](int blocks, int evenly) {  // of 128 tiles of queries with 128 of keys
    return costs.time(static_cast<float>(blocks), 128.f * 128.f, ceil_div(128 * 128, blocks), evenly);
  };
  EXPECT_LT(time(256, kMultiprocessors), time(272, kMultiprocessors));
  EXPECT_LT(time(384, kFewRowsDevice.slots()), time(256, kFewRowsDevice.slots()));  // beside empty ones
}

TEST(FewRows, ACallSaysIntoHowManyPartsAtMost) {
  ForwardParams p = problem(1, 1 << 17);
  p.dtype_kv = DType::kFloat8E4M3;
  p.batch = 50;
  EXPECT_GT(parts_of(p), 1);
  p.num_splits = 1;
  EXPECT_EQ(parts_of(p), 1);
}

// Of latent attention: 128 heads of one head of keys, whose first 512 columns are the values.
constexpr Tile kWideTile{32, 32};
ForwardParams latent(int seqlen_q, int seqlen_k, int num_heads = 128) {
  static float memory[1];
  ForwardParams p = problem(seqlen_q, seqlen_k);
  p.num_heads = num_heads;
  p.num_heads_kv = 1;
  p.head_dim = 576;
  p.head_dim_v = 512;
  p.k = p.v = {memory, 576 * seqlen_k, 576, 576};
  return p;
}

TEST(SharedRows, MoreOfWideHeads) {
  EXPECT_EQ(heads_sharing(latent(4, 512)), 128);
  EXPECT_EQ(heads_sharing(latent(4, 511)), 1);
  EXPECT_EQ(heads_sharing(latent(5, 4096)), 1);  // more than 512 rows
  EXPECT_EQ(heads_sharing(latent(32, 4096, 16)), 16);
  ForwardParams many = latent(1, 4096, 16);  // 16 rows, and no kernel of few of these
  many.batch = kMostTiles;
  EXPECT_EQ(heads_sharing(many), 16);
  ++many.batch;
  EXPECT_EQ(heads_sharing(many), 1);
}

TEST(ValuesInKeys, AreTheirFirstColumns) {
  const ForwardParams p = latent(1, 100);
  EXPECT_TRUE(values_in_keys(p));
  ForwardParams other = p;
  other.v.ptr = static_cast<float*>(p.v.ptr) + 1;
  EXPECT_FALSE(values_in_keys(other));
  for (std::int64_t TensorParam::* stride : {&TensorParam::batch, &TensorParam::row}) {
    other = p;
    other.v.*stride += 8;
    EXPECT_FALSE(values_in_keys(other));
  }
  other = p;
  other.v.head += 8;
  EXPECT_TRUE(values_in_keys(other));  // of one head nobody asks where the next is
  other.num_heads_kv = 2;
  EXPECT_FALSE(values_in_keys(other));
  other = p;
  other.head_dim_v = 640;
  EXPECT_FALSE(values_in_keys(other));
}

// Where no other kernel is as fast, also of many tiles, and of few keys.
TEST(KeyParts, WithoutOthers) {
  const auto parts = [](std::int64_t query_tiles, int keys) {
    return key_parts(query_tiles, keys, kWideTile.n, kDevice, kNoOthers);
  };
  EXPECT_EQ(parts(0, 4096), 1);
  EXPECT_EQ(parts(1, 16), 1);
  EXPECT_EQ(parts(1000, 1 << 20), 1);
  EXPECT_EQ(parts(128, 32768), 2);
  EXPECT_EQ(parts(4, 32768), 64);
  EXPECT_LE(parts(1, 1 << 20), kMostKeyParts);
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

const std::int32_t kSomeLengths[] = {4096, 100};

TEST(PlannedParts, OfFewQueriesInSequencesOfUnequalLengths) {
  using Problem = ForwardParams&;
  const auto planned_with = [](auto change) {
    ForwardParams p = problem(1, 4096);
    p.seqused_k = kSomeLengths;
    change(p);
    return key_parts_of(p).planned > 0;
  };
  EXPECT_TRUE(planned_with([](Problem) {}));
  EXPECT_FALSE(planned_with([](Problem p) { p.seqused_k = nullptr; }));
  EXPECT_FALSE(planned_with([](Problem p) { p.num_splits = 4; }));  // parts must not depend on who shares the batch
  EXPECT_FALSE(planned_with([](Problem p) { p.batch = 1; }));
  EXPECT_FALSE(planned_with([](Problem p) { p.batch = 0; }));
  EXPECT_FALSE(planned_with([](Problem p) { p.batch = 1000; }));  // balances without
  EXPECT_FALSE(planned_with([](Problem p) { p.seqlen_q = 0; }));
  EXPECT_TRUE(planned_with([](Problem p) { p.seqlen_q = 64; }));
  EXPECT_FALSE(planned_with([](Problem p) { p.seqlen_q = 65; }));
  EXPECT_FALSE(planned_with([](Problem p) { p.seqlen_k = 1000; }));
  EXPECT_FALSE(planned_with([](Problem p) {
    p.mask.kind = MaskKind::kBand;
    p.mask.band.left = 500;
    p.mask.band.right = 0;
  }));
  EXPECT_FALSE(planned_with([](Problem p) { p.mask.kind = MaskKind::kBlockSparse; }));
}

TEST(PlannedParts, OfSeveralTilesOfWideHeads) {
  const auto planned = [](int seqlen_q, int num_heads) {
    ForwardParams p = latent(seqlen_q, 4096, num_heads);
    p.seqused_k = kSomeLengths;
    return key_parts(p, heads_sharing(p), kWideTile, kDevice).planned;
  };
  constexpr int kAll = 2 * kMultiprocessors * kBlocksEach;
  EXPECT_EQ(planned(1, 16), 2 + kAll);
  EXPECT_EQ(planned(1, 128), 2 + kAll / 4);  // a part of a sequence is a thread block for each of its tiles
  EXPECT_EQ(planned(4, 128), 2 + kAll / 16);
  EXPECT_EQ(planned(5, 128), 2 + ceil_div(kAll, 128));  // heads have tiles of their own
}

TEST(PlannedParts, EachSequenceHasOneAtLeast) {
  ForwardParams p = problem(1, 4096);
  p.seqused_k = kSomeLengths;
  for (int batch : {2, 16, 100, 132}) {
    p.batch = batch;
    const KeyParts parts = key_parts_of(p);
    ASSERT_GT(parts.planned, 0);
    EXPECT_GE(parts.planned, batch);
    EXPECT_TRUE(parts.most >= 4 && parts.most <= kMostKeyParts);
    EXPECT_EQ(parts.arrivals, 0);
    const KeyParts few = key_parts(p, heads_sharing(p), Tile{kFewRowsTile, 64}, kFewRowsDevice);
    EXPECT_GE(few.planned, batch);
    EXPECT_EQ(few.arrivals, batch * p.num_heads);  // a counter for each tile
  }
  p.batch = kMostPlanned + 1;
  p.num_heads = p.num_heads_kv = 1;
  EXPECT_EQ(key_parts(p, 1, Tile{kFewRowsTile, 64}, {4 * kMultiprocessors, 3}).planned, 0);
}

TEST(PlannedParts, CutsCoverASequence) {
  for (int tiles : {0, 1, 7, 64, 1000})
    for (int limit : {1, 3, 64, 5000}) {
      const PartCut cut = PartCut::of(tiles, limit);
      EXPECT_GE(cut.parts, 1);
      EXPECT_LE(cut.longest, limit);
      EXPECT_GE(cut.parts * cut.longest, tiles);
      EXPECT_LT((cut.parts - 1) * limit, std::max(tiles, 1)) << "more parts than the limit asks for";
    }
}

TEST(PlannedParts, TriedLimitsBeginWithoutACutAndNeverMakeMorePartsThanAllowed) {
  for (int longest : {0, 1, 50, 4000})
    for (int most : {4, 17, 128}) {
      EXPECT_EQ(tried_limit(0, longest, most), std::max(longest, 1));
      for (int i = 0; i < kTriedLimits; ++i) {
        const int limit = tried_limit(i, longest, most);
        EXPECT_TRUE(limit >= 1 && limit <= tried_limit(std::max(i - 1, 0), longest, most));
        EXPECT_LE(PartCut::of(longest, limit).parts, most);
      }
      EXPECT_EQ(tried_limit(kTriedLimits - 1, longest, most), std::max(1, ceil_div(longest, most)));
    }
}

// What planned_part() does, one limit after the other.
int planned_limit(const std::vector<int>& tiles, int heads, KeyParts of,
                  const PlanProblem& problem = {1, 0, 1, false, kDevice}) {
  const int longest = *std::max_element(tiles.begin(), tiles.end());
  float all = 0, best = 0;
  for (int own : tiles) all += static_cast<float>(own * heads);
  int chosen = 0;
  for (int i = 0; i < kTriedLimits; ++i) {
    const int limit = tried_limit(i, longest, of.most);
    int parts = 0, longest_part = 0;
    for (int own : tiles) {
      const PartCut cut = PartCut::of(own, limit);
      parts += cut.parts;
      longest_part = std::max(longest_part, cut.longest);
    }
    const float time = problem.time(static_cast<float>(parts * heads), all, longest_part);
    if (parts > of.planned || (chosen != 0 && time >= best)) continue;
    best = time;
    chosen = limit;
  }
  return chosen;
}

TEST(PlannedParts, TheLongestIsCutWhereItDecides) {
  const KeyParts of{17, 148};
  const std::vector<int> equal(16, 128);  // tiles of 64 keys, of 8 heads: a thread block each fills the device
  EXPECT_GE(planned_limit(equal, 8, of), 64);
  std::vector<int> unequal;
  for (int i = 0; i < 16; ++i) unequal.push_back(8 + 16 * i);
  EXPECT_LT(planned_limit(unequal, 8, of), 32);
  EXPECT_EQ(planned_limit({1, 1, 0}, 8, of), 1);
  // Of few rows on an H200: such as fill nearly all slots, as measured.
  const PlanProblem few{1, 0, 1, true, kFewRowsDevice, FewRowsCosts({kMultiprocessors, 3, 4916})};
  EXPECT_EQ(planned_limit(equal, 8, {25, 115}, few), 43);
  const int limit = planned_limit(unequal, 8, {25, 115}, few);
  EXPECT_TRUE(limit >= 24 && limit <= 64) << limit;
}

TEST(PlannedParts, TakeLongerTheMoreUnequalTheyAre) {
  const auto time = [](float blocks, float tiles, int longest) {
    return planned_time(blocks, tiles, longest, kDevice);
  };
  EXPECT_LT(time(264, 264 * 16, 16), time(264, 264 * 16, 30));
  EXPECT_LT(time(1000, 1000 * 16, 16), time(1000, 1000 * 16, 60));
  EXPECT_LT(time(1000, 1000 * 16, 16), time(1000, 2000 * 16, 16));
  EXPECT_LT(time(264, 264 * 16, 16), time(265, 264 * 16, 16));  // one more does not run at once with the others
  EXPECT_LT(time(132, 132 * 16, 16), time(133, 132 * 16, 16));
}

TEST(KeySplit, HeadsThatShareTakeNoMorePlaces) {
  ForwardParams p = problem(5, 1000);
  p.num_heads = 8;
  const KeySplit split(p, {3}, nullptr);
  EXPECT_EQ(split.heads, 4);
  EXPECT_EQ(split.rows_of_head, 10);
  EXPECT_EQ(split.size(), std::size_t{3} * p.batch * p.num_heads * p.seqlen_q * (p.head_dim_v + 2) * sizeof(float));
}

TEST(KeySplit, EveryRowOfEveryPartHasAPlaceOfItsOwn) {
  const ForwardParams p = problem(5, 1000);
  const KeySplit split(p, {3}, nullptr);
  std::set<std::int64_t> seen;
  for (int part = 0; part < 3; ++part)
    for (int batch = 0; batch < p.batch; ++batch)
      for (int head = 0; head < p.num_heads; ++head)
        for (int query = 0; query < p.seqlen_q; ++query) {
          const KeyPart found = split.part(part, batch);
          EXPECT_EQ(std::make_pair(found.index, found.parts), std::make_pair(part, split.count(batch)));
          EXPECT_EQ(found.slot, split.slot(part, batch));
          const std::int64_t place = split.row(found.slot, head, query);
          EXPECT_TRUE(place >= 0 && place < 3 * p.batch * p.num_heads * p.seqlen_q);
          EXPECT_TRUE(seen.insert(place).second);
        }
  EXPECT_EQ(split.size(), seen.size() * (p.head_dim_v + 2) * sizeof(float));
}

// Where a kernel joins planned parts: of sequences with one part, one and three.
TEST(KeySplit, PlannedPartsOfASequenceAreNeighbours) {
  ForwardParams p = problem(1, 4096);
  p.batch = 3;
  p.seqused_k = kSomeLengths;
  const KeyParts most{4, 7};
  std::vector<std::uint64_t> memory(KeySplit(p, most, nullptr).size() / 8 + 2);
  char* const base = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(memory.data()) + 15) / 16 * 16);
  const KeySplit split(p, most, base);
  const int parts[] = {1, 1, 3};
  int end = 0;
  for (int b = 0; b < 3; ++b) split.ends[b] = end += parts[b];
  std::set<int> seen;
  for (int b = 0; b < 3; ++b) {
    EXPECT_EQ(split.count(b), parts[b]);
    const KeyPart first{b, 0, parts[b], split.slot(0, b)};
    for (int i = 0; i < parts[b]; ++i) {
      EXPECT_EQ(split.slot_beside(first, i), split.slot(i, b));
      EXPECT_TRUE(seen.insert(split.slot(i, b)).second);
    }
  }
  EXPECT_EQ(seen.size(), 5u);
  // What parts leave begins behind the ends, and ends where size() says.
  EXPECT_GE(reinterpret_cast<char*>(split.out), reinterpret_cast<char*>(split.ends + p.batch));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(split.out) % 16, 0u);
  EXPECT_EQ(reinterpret_cast<char*>(split.states + split.row(6, p.num_heads - 1, 0) + 1), base + split.size());
}

// Where the last thread block of a tile joins them.
TEST(KeySplit, PlannedPartsOfFewRowsHaveACounterForEachTile) {
  ForwardParams p = problem(1, 4096);
  p.batch = 3;
  p.seqused_k = kSomeLengths;
  const KeyParts parts{4, 7, 3 * p.num_heads};
  std::vector<std::uint64_t> memory(KeySplit(p, parts, nullptr).size() / 8);
  const KeySplit split(p, parts, memory.data());
  EXPECT_EQ(split.ends, nullptr);
  EXPECT_GE(static_cast<void*>(split.out), static_cast<void*>(split.arrivals + parts.arrivals));
  EXPECT_EQ(static_cast<void*>(split.states + split.row(6, p.num_heads - 1, 0) + 1),
            static_cast<void*>(memory.data() + memory.size()));
  EXPECT_EQ(split.slot_beside(KeyPart{1, 2, 3, 5}, 0), 3);
  EXPECT_FALSE(split.has_one_part());
}

// Buffers may be longer than what is in them.
TEST(KeySplit, RowsBehindPackedSequencesTakeNoMemory) {
  ForwardParams p = problem(1, 5000);
  const std::size_t batched = KeySplit(p, {4}, nullptr).size();
  const std::int32_t ends[] = {0, 1, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = ends;
  p.total_q = 1 << 20;
  EXPECT_EQ(KeySplit(p, {4}, nullptr).size(), batched);
}

}  // namespace
}  // namespace flashsdk::sm80
