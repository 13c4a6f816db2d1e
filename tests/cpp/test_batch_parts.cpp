// How a backward of many short sequences is cut into parts (cuda/batch_parts.h), as the host plans it.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "cuda/backward_workspace.h"
#include "cuda/batch_parts.h"
#include "rng.h"

namespace flashsdk::testing {
namespace {

constexpr int kTileRows = 128;
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
double workspace_over_dq(BackwardParams p) {
  const double rows = p.cu_seqlens_q != nullptr ? p.total_q : static_cast<double>(p.batch) * p.seqlen_q;
  p.batch = cuda::sequences_at_once(p, kTileRows, kWorkers);
  return static_cast<double>(cuda::BackwardWorkspace(p, kTileRows, p.head_dim, nullptr).size) /
         (rows * p.num_heads * p.head_dim * sizeof(float));
}

TEST(BatchParts, KeepTheWorkspaceOfTheOrderOfDq) {
  EXPECT_LT(workspace_over_dq(problem(20000, 1, 8)), 5);
  EXPECT_LT(workspace_over_dq(problem(100000, 3, 16)), 5);
  std::vector<std::int32_t> ends{0};
  for (int i = 0; i < 20000; ++i) ends.push_back(ends.back() + 1 + i % 3);
  EXPECT_LT(workspace_over_dq(packed(ends, 3, 8)), 6);
}

TEST(BatchParts, GiveEachWorkerEightTiles) {
  const BackwardParams p = problem(20000, 1, 8);
  EXPECT_GE(cuda::sequences_at_once(p, kTileRows, kWorkers) * p.num_heads, 8 * kWorkers.count);
}

TEST(BatchParts, LeaveBatchesOfLongSequencesWhole) {
  for (int seqlen : {49, 64, 128, 197, 512, 4096}) {
    EXPECT_EQ(cuda::sequences_at_once(problem(64, seqlen, 12), kTileRows, kWorkers), 64) << seqlen;
  }
  EXPECT_EQ(cuda::sequences_at_once(problem(0, 49, 12), kTileRows, kWorkers), 0);
}

// Every part's tensors begin where the first of its sequences lies, and dropout counts heads as in the whole.
TEST(BatchParts, AreProblemsOfTheirOwn) {
  std::vector<std::uint16_t> q(1 << 16), bias(1 << 16);
  std::vector<float> lse(1 << 16), slopes(1 << 12);
  std::vector<std::int32_t> offsets(1 << 12);
  Rng rng(1);
  int most_parts = 0;
  for (int round = 0; round < 200; ++round) {
    BackwardParams p = problem(between(rng, 0, 40), between(rng, 1, 3), between(rng, 1, 4));
    p.q = {q.data(), between(rng, 0, 999), 64, 64};
    p.dlse = {lse.data(), between(rng, 0, 99), 1, 1};
    p.score.bias = {bias.data(), DType::kBFloat16, between(rng, 0, 99), 0, 0, 0};
    p.score.alibi_slopes = slopes.data();
    p.score.alibi_batch = between(rng, 0, 9);
    p.mask.col_full = {offsets.data(), offsets.data(), between(rng, 0, 9), 0};
    int next = 0, parts = 0;
    cuda::for_each_part(p, kTileRows, {50 << 20, 1}, [&](const BackwardParams& part) {
      EXPECT_EQ(static_cast<std::uint16_t*>(part.q.ptr) - q.data(), next * p.q.batch);
      EXPECT_EQ(part.dlse.ptr - lse.data(), next * p.dlse.batch);
      EXPECT_EQ(static_cast<const std::uint16_t*>(part.score.bias.ptr) - bias.data(), next * p.score.bias.batch);
      EXPECT_EQ(part.score.alibi_slopes - slopes.data(), next * p.score.alibi_batch);
      EXPECT_EQ(part.mask.col_full.offsets - offsets.data(), next * p.mask.col_full.batch);
      EXPECT_EQ(part.mask.col_full.indices, offsets.data());
      EXPECT_EQ(part.k.ptr, nullptr);
      EXPECT_EQ(part.first_head, next * p.num_heads);
      next += part.batch;
      ++parts;
    });
    EXPECT_EQ(next, p.batch);
    EXPECT_GE(parts, 1);
    most_parts = std::max(most_parts, parts);
  }
  EXPECT_GT(most_parts, 5);
}

}  // namespace
}  // namespace flashsdk::testing
