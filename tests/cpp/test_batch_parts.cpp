// How a backward of many short sequences is cut into parts (cuda/host/batch_parts.h), as the host plans it.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/host/batch_parts.h"
#include "cuda/pass/backward_workspace.h"
#include "rng.h"

namespace flashsdk::testing {
namespace {

constexpr Tile kTile{128, 128};
constexpr cuda::Workers kWorkers{50 << 20, 132};

BackwardParams problem(int batch, int seqlen, int heads) {
  BackwardParams p{};
  p.dtype = DType::kBFloat16;
  p.batch = batch;
  p.num_heads = p.num_heads_kv = heads;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.head_dim = p.head_dim_v = 64;
  return p;
}
BackwardParams packed(const std::vector<std::int32_t>& ends, int longest, int heads) {
  BackwardParams p = problem(static_cast<int>(ends.size()) - 1, longest, heads);
  p.cu_seqlens_q = p.cu_seqlens_k = ends.data();
  p.total_q = p.total_k = ends.back();
  return p;
}
int at_once(const BackwardParams& p) { return cuda::sequences_at_once(p, kTile, kWorkers); }
double workspace_over_dq(const BackwardParams& p) {
  const double rows = p.cu_seqlens_q != nullptr ? p.total_q : static_cast<double>(p.batch) * p.seqlen_q;
  const ForwardParams part = cuda::largest_part(p, kTile, kWorkers);
  return static_cast<double>(cuda::BackwardWorkspace(part, kTile.m, p.head_dim, nullptr).size) /
         (rows * p.num_heads * p.head_dim * sizeof(float));
}

TEST(BatchParts, KeepTheWorkspaceOfTheOrderOfDq) {
  EXPECT_LT(workspace_over_dq(problem(20000, 1, 8)), 5);
  EXPECT_LT(workspace_over_dq(problem(100000, 3, 16)), 5);
  std::vector<std::int32_t> ends{0};
  for (int i = 0; i < 20000; ++i) ends.push_back(ends.back() + 1 + i % 3);
  EXPECT_LT(workspace_over_dq(packed(ends, 3, 8)), 5);
}

TEST(BatchParts, GiveEachWorkerTwoKeyTiles) {
  EXPECT_GE(at_once(problem(20000, 1, 8)) * 8, 2 * kWorkers.count);
  BackwardParams p = problem(1000, 1, 32);
  p.num_heads_kv = 1;
  p.seqlen_k = 128;
  EXPECT_GE(at_once(p), 250);  // a key tile each: 264 at least, in parts of about the same size
}

TEST(BatchParts, AreOfAboutTheSameSize) {
  for (int batch : {1000, 4000, 20000, 99999}) {
    const int most = at_once(problem(batch, 31, 16)), parts = (batch + most - 1) / most;
    EXPECT_GT(batch - (parts - 1) * most, most - parts) << batch;
  }
}

TEST(BatchParts, LeaveBatchesOfLongSequencesWhole) {
  for (int seqlen : {49, 64, 128, 197, 512, 4096}) EXPECT_EQ(at_once(problem(64, seqlen, 12)), 64) << seqlen;
  EXPECT_EQ(at_once(problem(0, 49, 12)), 0);
  EXPECT_EQ(at_once(problem(1000000, 0, 8)), 1000000);  // nothing to keep
  BackwardParams p = problem(20000, 1, 8);
  p.mask.user = &p;  // what a policy of an application keeps for each sequence
  EXPECT_EQ(at_once(p), 20000);
}

// Every part's tensors begin where the first of its sequences lies, and dropout counts heads as in the whole.
TEST(BatchParts, AreProblemsOfTheirOwn) {
  std::vector<std::uint16_t> elements(1 << 16);
  std::vector<float> floats(1 << 16);
  std::vector<std::int32_t> offsets(1 << 12);
  const std::vector<std::uint64_t> seeds(1 << 7);
  const auto tensors = [](BackwardParams& p) {
    return std::vector<TensorParam*>{&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
  };
  const auto lists = [](BackwardParams& p) {
    return std::vector<BlockListParam*>{&p.mask.row_partial, &p.mask.row_full, &p.mask.col_partial, &p.mask.col_full};
  };
  Rng rng(1);
  int most_parts = 0;
  for (int round = 0; round < 200; ++round) {
    BackwardParams p = problem(between(rng, 0, 40), between(rng, 1, 3), between(rng, 1, 4));
    for (TensorParam* t : tensors(p)) *t = {elements.data(), between(rng, 0, 999), 64, 64};
    for (RowParam* r : {&p.lse, &p.dlse}) *r = {floats.data(), between(rng, 0, 99), 1, 1};
    if (round % 2 == 0) p.dlse = {};
    for (BlockListParam* list : lists(p)) *list = {offsets.data(), offsets.data(), between(rng, 0, 9), 0};
    p.score.bias = {elements.data(), DType::kBFloat16, between(rng, 0, 99), 0, 0, 0};
    p.score.alibi_slopes = floats.data();
    p.score.alibi_batch = between(rng, 0, 9);
    DropoutParam& dropout = p.score.dropout;
    if (round % 3 != 0) dropout.state = seeds.data();
    dropout.state_batch = round % 3 == 1 ? 2 : 0;
    dropout.heads_each = round % 3 == 1 ? 0 : p.num_heads;
    int next = 0, parts = 0;
    cuda::for_each_part(p, kTile, {50 << 20, 1}, [&](BackwardParams part) {
      const auto moved = [&](const auto* now, const auto* from) { return now - from; };
      for (std::size_t i = 0; i < tensors(p).size(); ++i) {
        EXPECT_EQ(moved(static_cast<std::uint16_t*>(tensors(part)[i]->ptr), elements.data()),
                  next * tensors(p)[i]->batch);
      }
      for (std::size_t i = 0; i < lists(p).size(); ++i) {
        EXPECT_EQ(moved(lists(part)[i]->offsets, offsets.data()), next * lists(p)[i]->batch);
        EXPECT_EQ(lists(part)[i]->indices, offsets.data());
      }
      EXPECT_EQ(moved(part.lse.ptr, floats.data()), next * p.lse.batch);
      if (p.dlse.ptr == nullptr)
        EXPECT_EQ(part.dlse.ptr, nullptr);
      else
        EXPECT_EQ(moved(part.dlse.ptr, floats.data()), next * p.dlse.batch);
      EXPECT_EQ(moved(static_cast<const std::uint16_t*>(part.score.bias.ptr), elements.data()),
                next * p.score.bias.batch);
      EXPECT_EQ(moved(part.score.alibi_slopes, floats.data()), next * p.score.alibi_batch);
      EXPECT_EQ(part.score.dropout.first_head, next * dropout.heads_each);
      if (dropout.state == nullptr)
        EXPECT_EQ(part.score.dropout.state, nullptr);
      else
        EXPECT_EQ(moved(part.score.dropout.state, seeds.data()), next * dropout.state_batch);
      next += part.batch;
      ++parts;
    });
    EXPECT_EQ(next, p.batch);
    EXPECT_GE(parts, 1);
    most_parts = std::max(most_parts, parts);
  }
  EXPECT_GT(most_parts, 5);
}

// Packed: places of a part's sequences lie inside of its workspace, one behind another.
TEST(BatchParts, HavePlacesForPackedSequences) {
  Rng rng(2);
  int most_parts = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<std::int32_t> ends{0};
    for (int n = between(rng, 1, 3000), i = 0; i < n; ++i)
      ends.push_back(ends.back() + between(rng, 0, round % 3 == 0 ? 300 : 5));
    const BackwardParams p = packed(ends, 300, 2);
    const cuda::BackwardWorkspace ws(cuda::largest_part(p, kTile, kWorkers), kTile.m, p.head_dim, nullptr);
    int parts = 0;
    cuda::for_each_part(p, kTile, kWorkers, [&](const BackwardParams& part) {
      std::int64_t free = 0;
      for (int batch = 0; batch < part.batch; ++batch) {
        const SeqlenInfo seq(part, batch);
        const std::int64_t first = ws.first_tile(part, seq, batch);
        EXPECT_GE(first, free);
        free = first + ceil_div(seq.seqlen_q, kTile.m);
      }
      EXPECT_LE(free, ws.tiles_per_head);
      ++parts;
    });
    most_parts = std::max(most_parts, parts);
  }
  EXPECT_GT(most_parts, 3);
}

}  // namespace
}  // namespace flashsdk::testing
