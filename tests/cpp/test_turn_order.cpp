// The schedules' order; the turns of deterministic calls: that with it everything ends, and what waiting costs.
#include "common/turn_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "block_lists.h"
#include "common/mask_policy.h"
#include "cuda/schedule/tile_scheduler.h"
#include "rng.h"

namespace flashsdk::testing {
namespace {

template <class F>
void with_policy(const ForwardParams& p, int batch, int head, F&& f) {
  const SeqlenInfo seq(p, batch);
  switch (p.mask.kind) {
    case MaskKind::kDense:
      return f(DensePolicy(p.mask, seq, batch, head));
    case MaskKind::kBand:
      return f(BandPolicy(p.mask, seq, batch, head));
    case MaskKind::kBlockSparse:
      return f(BlockSparsePolicy(p.mask, seq, batch, head));
  }
}

// What a thread block does with a key tile: it adds to tiles of queries, in this order, when the turn has come.
struct Step {
  int tile;  // over all heads and sequences
  int turn;
};
using Work = std::vector<Step>;

struct Problem {
  ForwardParams p;
  Tile tile{};
  std::vector<int> order;  // of packed sequences, where a schedule takes one after another
  std::vector<std::int32_t> cu_q, cu_k;

  int tiles_per_head() const { return ceil_div(p.seqlen_q, tile.m); }
  int tile_index(int batch, int head, int m) const { return (batch * p.num_heads + head) * tiles_per_head() + m; }

  // In the order in which thread blocks take it.
  std::vector<Work> schedule() const {
    const cuda::BackwardSchedule tiles = cuda::backward_schedule(p, tile.n, 2, {50 << 20, 132});
    std::vector<Work> found;
    if (order.empty()) {
      for (int index = 0; index < tiles.size(); ++index) found.push_back(work(tiles.work(index)));
    }
    for (int batch : order) {
      const cuda::TileSchedule own = tiles.of_sequence(ceil_div(SeqlenInfo(p, batch).seqlen_k, tile.n));
      for (int index = 0; index < own.size(); ++index) {
        const cuda::TileWork taken = own.work(index);
        found.push_back(work({taken.block, taken.head, batch}));
      }
    }
    return found;
  }

 private:
  Work work(const cuda::TileWork& taken) const {
    Work found;
    if (taken.block * tile.n < SeqlenInfo(p, taken.batch).seqlen_k) {
      for (int h = 0; h < p.heads_per_group(); ++h) add_steps(taken, taken.head * p.heads_per_group() + h, found);
    }
    return found;
  }

  void add_steps(const cuda::TileWork& taken, int head, Work& work) const {
    with_policy(p, taken.batch, head, [&](const auto& policy) {
      TileWalk walk = policy.col_walk(tile, taken.block);
      for (TileRef ref{}; walk.next(ref);) {
        const int turn = turn_of(p.mask, policy.row_walk(tile, ref.index), taken.block);
        work.push_back({tile_index(taken.batch, head, ref.index), turn});
      }
    });
  }
};

enum class Turns { kNone, kPassedAtOnce, kPassedAtTheEnd };

// Steps until all is done by so many thread blocks, each of which takes the next work when it is free, and in each step
// adds once if the turn has come; -1 if nothing moves any more. A turn is passed on with the addition, or as late as
// may be: after the last step of the work. Kernels are in between; that two of their warps add in turns is not played,
// as a turn that is passed on sooner stops nobody.
int steps_to_end(const Problem& problem, int blocks, Turns how) {
  struct Block {
    const Work* work = nullptr;
    std::size_t step = 0;
  };
  const std::vector<Work> works = problem.schedule();
  std::vector<Block> running(blocks);
  std::vector<int> turns(problem.p.batch * problem.p.num_heads * problem.tiles_per_head(), 0);
  std::size_t taken = 0;
  for (int time = 0;; ++time) {
    std::vector<int> passed;
    bool busy = false, moved = false;
    for (Block& block : running) {
      while ((block.work == nullptr || block.step == block.work->size()) && taken < works.size())
        block = {&works[taken++], 0};
      if (block.work == nullptr || block.step == block.work->size()) continue;
      busy = true;
      const Step& step = (*block.work)[block.step];
      if (how != Turns::kNone && turns[step.tile] != step.turn) continue;
      moved = true;
      ++block.step;
      if (how != Turns::kPassedAtTheEnd) {
        passed.push_back(step.tile);
      } else if (block.step == block.work->size()) {
        for (const Step& done : *block.work) passed.push_back(done.tile);
      }
    }
    if (!busy) return time;
    if (!moved) return -1;
    for (int tile : passed) ++turns[tile];  // others see it in their next step
  }
}

// Turns at each tile of queries count from 0, in the order in which work is taken: nobody waits for later work.
void expect_turns_in_order(const Problem& problem, const std::string& name) {
  const ForwardParams& p = problem.p;
  std::vector<int> turns(p.batch * p.num_heads * problem.tiles_per_head(), 0);
  for (const Work& work : problem.schedule()) {
    for (const Step& step : work) ASSERT_EQ(step.turn, turns[step.tile]++) << name << " tile " << step.tile;
  }
  for (int batch = 0; batch < p.batch; ++batch) {
    for (int head = 0; head < p.num_heads; ++head) {
      with_policy(p, batch, head, [&](const auto& policy) {
        for (int m = 0; m < ceil_div(SeqlenInfo(p, batch).seqlen_q, problem.tile.m); ++m) {
          TileWalk row = policy.row_walk(problem.tile, m);
          int key_tiles = 0;
          for (TileRef ref{}; row.next(ref);) ++key_tiles;
          ASSERT_EQ(turns[problem.tile_index(batch, head, m)], key_tiles) << name << " m " << m;
        }
      });
    }
  }
}

Problem random_problem(Rng& rng, MaskKind kind, bool packed) {
  Problem problem;
  ForwardParams& p = problem.p;
  problem.tile = {between(rng, 1, 4), between(rng, 1, 4)};
  p.batch = between(rng, 1, 3);
  p.num_heads_kv = between(rng, 1, 3);
  p.num_heads = p.num_heads_kv * between(rng, 1, 3);
  p.head_dim = p.head_dim_v = 64 << between(rng, 0, 2);
  p.seqlen_q = between(rng, 1, 40);
  p.seqlen_k = between(rng, 1, 40);
  p.deterministic = true;
  p.mask.kind = kind;
  if (between(rng, 0, 2) > 0) p.mask.band.right = between(rng, -8, 8);
  if (between(rng, 0, 2) > 0) p.mask.band.left = between(rng, -8, 8);
  p.mask.band.top_left = between(rng, 0, 1) == 1;
  if (packed) {
    problem.cu_q = problem.cu_k = {0};
    for (int b = 0; b < p.batch; ++b) {
      problem.cu_q.push_back(problem.cu_q.back() + between(rng, 0, p.seqlen_q));
      problem.cu_k.push_back(problem.cu_k.back() + between(rng, 0, p.seqlen_k));
    }
  }
  return problem;
}

// Everything that must hold for one problem. The pointers of packed sequences are set here, where it no longer moves.
void check(Rng& rng, Problem& problem, const std::string& name) {
  if (!problem.cu_q.empty()) {
    problem.p.cu_seqlens_q = problem.cu_q.data();
    problem.p.cu_seqlens_k = problem.cu_k.data();
    problem.p.total_q = problem.cu_q.back() + problem.tile.m;  // the last rows are of no sequence
    problem.p.total_k = problem.cu_k.back() + problem.tile.n;
  }
  for (const bool by_sequence : {false, true}) {
    if (by_sequence && problem.cu_q.empty()) break;
    problem.order.resize(by_sequence ? problem.p.batch : 0);
    std::iota(problem.order.begin(), problem.order.end(), 0);
    std::shuffle(problem.order.begin(), problem.order.end(), rng);
    expect_turns_in_order(problem, name);
    for (int blocks : {1, 2, 7, 132}) {
      for (Turns how : {Turns::kPassedAtOnce, Turns::kPassedAtTheEnd})
        EXPECT_GE(steps_to_end(problem, blocks, how), 0) << name << " blocks " << blocks;
    }
  }
}

TEST(TurnOrder, RandomDenseAndBand) {
  Rng rng(1);
  for (int round = 0; round < 1200 && !::testing::Test::HasFailure(); ++round) {
    const MaskKind kind = round % 3 == 0 ? MaskKind::kDense : MaskKind::kBand;
    Problem problem = random_problem(rng, kind, between(rng, 0, 1) == 1);
    check(rng, problem, "round " + std::to_string(round));
  }
}

TEST(TurnOrder, RandomLayouts) {
  Rng rng(2);
  for (int round = 0; round < 600 && !::testing::Test::HasFailure(); ++round) {
    Problem problem = random_problem(rng, MaskKind::kBlockSparse, between(rng, 0, 1) == 1);
    MaskParam& mask = problem.p.mask;
    mask.block_q = problem.tile.m * between(rng, 1, 4);
    mask.block_k = problem.tile.n * between(rng, 1, 4);
    std::vector<Layout> layouts;
    for (int head = 0; head < problem.p.num_heads; ++head) {
      Layout layout{ceil_div(problem.p.seqlen_q, mask.block_q), ceil_div(problem.p.seqlen_k, mask.block_k), {}};
      for (int b = 0; b < layout.rows * layout.cols; ++b) layout.kind.push_back(between(rng, 0, 2));
      layouts.push_back(layout);
    }
    const MaskLists lists(layouts);
    lists.put_into(mask, 0, 1);
    check(rng, problem, "round " + std::to_string(round));
  }
}

// 132 thread blocks, 16384 tokens. An addition is seen a step after it began, which is about what a GPU takes.
TEST(TurnOrder, WaitingCostsLittle) {
  const Tile tiles[] = {{128, 128}, {64, 128}, {64, 64}};
  for (int i = 0; i < 3; ++i) {
    for (int seqlen : {1024, 4096}) {
      for (int window : {-1, 0, 512}) {  // no mask, causal, of both sides
        Problem problem;
        ForwardParams& p = problem.p;
        problem.tile = tiles[i];
        p.head_dim = p.head_dim_v = 64 << i;
        p.num_heads = p.num_heads_kv = 2048 / p.head_dim;
        p.batch = 16384 / seqlen;
        p.seqlen_q = p.seqlen_k = seqlen;
        p.deterministic = true;
        if (window >= 0) {
          p.mask.kind = MaskKind::kBand;
          p.mask.band.right = window;
          if (window > 0) p.mask.band.left = window;
        }
        const int with = steps_to_end(problem, 132, Turns::kPassedAtOnce);
        const int without = steps_to_end(problem, 132, Turns::kNone);
        EXPECT_LT(with, 1.15 * without) << "head_dim " << p.head_dim << " seqlen " << seqlen << " window " << window;
      }
    }
  }
}

}  // namespace
}  // namespace flashsdk::testing
