// The C++ API, forward and backward, against a double-precision loop. ctest runs these once per instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "attention_fixture.h"
#include "flashsdk/flashsdk.h"
#include "problem.h"

namespace flashsdk::testing {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

TEST_F(Attention, Gpt2HeadsCausal) {
  for (DType dtype : kDTypes) {
    Problem p({.seqlen_q = 256, .seqlen_k = 256, .num_heads = 2, .num_heads_kv = 2}, dtype);
    p.options.mask = Causal();
    p.check(std::string("GPT-2 ") + to_string(dtype));
  }
}

TEST_F(Attention, LlamaHeadsGroupedQueries) {
  for (DType dtype : kDTypes) {
    Problem p({.seqlen_q = 130, .seqlen_k = 130, .num_heads = 8, .num_heads_kv = 2, .head_dim = 128, .head_dim_v = 128},
              dtype);
    p.options.mask = Causal();
    p.check(std::string("Llama ") + to_string(dtype));
  }
}

TEST_F(Attention, DecodesOneQuery) {
  Problem p({.batch = 3, .seqlen_q = 1, .seqlen_k = 500, .num_heads = 4, .num_heads_kv = 1});
  p.options.mask = Causal();
  p.check("one query");
}

TEST_F(Attention, DecodesGroupedHeads) {
  const Layout layouts[] = {Layout::kContiguous, Layout::kPadded, Layout::kHeadsFirst};
  const Mask masks[] = {Dense{}, Causal(), SlidingWindow(70, 0), SlidingWindow(150, -40), Causal(Alignment::kTopLeft)};
  int n = 0;
  for (int group : {2, 4, 8, 32, 70}) {
    for (const Mask& mask : masks) {
      for (DType dtype : kDTypes) {
        const Layout layout = layouts[n++ % 3];
        const int heads_kv = group > 8 ? 1 : 2;
        Problem p({.batch = 2,
                   .seqlen_q = 1,
                   .seqlen_k = 201,
                   .num_heads = group * heads_kv,
                   .num_heads_kv = heads_kv,
                   .head_dim = 40,
                   .head_dim_v = 72},
                  dtype, layout, static_cast<unsigned>(n));
        for (HostTensor* t : {&p.lse, &p.dlse}) *t = HostTensor(DType::kFloat32, {2, group * heads_kv, 1}, layout);
        p.dlse.fill_normal(p.rng());
        p.options.mask = mask;
        p.with_dlse = n % 2 == 0;
        if (n % 4 == 1) p.options.softcap = 3;
        if (n % 5 < 2) {
          p.bias = HostTensor(n % 5 == 0 ? DType::kFloat16 : DType::kFloat32,
                              {1, n % 3 == 0 ? 1 : p.q.view().shape[2], 1, 201});
          p.bias.fill_normal(p.rng());
        }
        p.check(std::to_string(group) + " heads a group, problem " + std::to_string(n));
      }
    }
  }
}

TEST_F(Attention, HeadDimsFrom1To256) {
  for (int d : {1, 2, 7, 8, 16, 31, 33, 64, 65, 96, 100, 127, 129, 192, 200, 255, 256}) {
    Problem p({.seqlen_q = 19, .seqlen_k = 23, .head_dim = d, .head_dim_v = 257 - d}, kDTypes[d % 3]);
    p.check("head_dim " + std::to_string(d));
  }
}

TEST_F(Attention, WideHeads) {
  for (int d : {257, 320, 511, 512, 576}) {
    for (int queries : {1, 3, 70}) {
      Problem p({.batch = 2,
                 .seqlen_q = queries,
                 .seqlen_k = 110,
                 .num_heads = 4,
                 .num_heads_kv = 1,
                 .head_dim = d,
                 .head_dim_v = 833 - d},
                kDTypes[(d + queries) % 3]);
      if (d % 2 == 0) p.options.mask = Causal();
      if (d == 320) p.options.softcap = 3;
      p.check("head_dim " + std::to_string(d) + ", queries " + std::to_string(queries));
    }
  }
}

TEST_F(Attention, RowsThatSeeNoKey) {
  for (DType dtype : kDTypes) {
    Problem p({.seqlen_q = 90, .seqlen_k = 40}, dtype);
    p.options.mask = Causal();  // bottom-right: the first 50 queries see nothing
    p.with_dlse = true;
    p.check("no key");
    EXPECT_EQ(load(p.lse.view(), {0, 0, 49}), -INFINITY);
    EXPECT_NE(load(p.lse.view(), {0, 0, 50}), -INFINITY);
    p.options.mask = SlidingWindow(-3, 2);  // j - i from 3 to 2: nobody sees anything
    p.check("nobody");
  }
}

TEST_F(Attention, EmptyDimensions) {
  Problem no_keys({.seqlen_q = 5, .seqlen_k = 0});
  no_keys.check("no keys");
  Problem no_queries({.seqlen_q = 0, .seqlen_k = 5});
  no_queries.check("no queries");
  Problem no_batch({.batch = 0});
  no_batch.check("no batch");
  Problem no_rows({.lengths_q = {0, 0}, .lengths_k = {0, 0}});
  no_rows.check("packed, no rows at all");
}

// Nothing is read, so an empty tensor may have no address and any stride.
TEST_F(Attention, EmptyTensorsWithoutAnAddress) {
  constexpr std::int64_t kFar = std::int64_t{1} << 62;
  for (bool keys : {true, false}) {
    Problem p({.batch = 3, .seqlen_q = keys ? 5 : 0, .seqlen_k = keys ? 0 : 5, .num_heads = 4, .num_heads_kv = 2});
    p.out.fill(NAN);
    for (HostTensor* t : {&p.dq, &p.dk, &p.dv}) t->fill(NAN);
    ForwardArgs forward = p.forward_args();
    BackwardArgs backward = p.backward_args();
    for (TensorView* t :
         {&forward.q, &forward.k, &forward.v, &forward.out, &forward.lse, &backward.q, &backward.k, &backward.v,
          &backward.out, &backward.lse, &backward.dout, &backward.dq, &backward.dk, &backward.dv}) {
      if (t->numel() > 0) continue;
      t->data = nullptr;
      t->stride[0] = t->stride[1] = t->stride[2] = kFar;
    }
    forward.lse.stride[2] = backward.lse.stride[2] = 1;
    GuardedWorkspace workspace(std::max(workspace_size(forward), workspace_size(backward)));
    mha_fwd(forward, workspace.options());
    mha_bwd(backward, workspace.options());
    for (const HostTensor* t : {&p.out, &p.dq, &p.dk, &p.dv}) {
      for (double x : dense(t->view())) ASSERT_EQ(x, 0);
    }
  }
}

// dQ accumulators and row values: a sequence of one query takes no more than its query.
TEST_F(Attention, WorkspaceOfManyShortSequencesIsThatOfTheirQueries) {
  constexpr std::int64_t kSequences = 1000, kHeads = 8, kHeadDim = 64;
  const std::size_t dq = kSequences * kHeads * kHeadDim * sizeof(float);
  for (DType dtype : kDTypes) {
    const Shape one{.seqlen_q = 1, .seqlen_k = 1, .num_heads = kHeads, .num_heads_kv = kHeads};
    Shape batched = one, packed = one;
    batched.batch = kSequences;
    packed.lengths_q = packed.lengths_k = std::vector<int>(kSequences, 1);
    const std::size_t of_threads = workspace_size(Problem(one, dtype).backward_args());
    for (const Shape& shape : {batched, packed})
      EXPECT_LT(workspace_size(Problem(shape, dtype).backward_args()), of_threads + dq + dq / 4)
          << to_string(dtype) << (shape.packed() ? ", packed" : "");
  }
}

TEST_F(Attention, Packed) {
  for (DType dtype : kDTypes) {
    Problem p({.num_heads = 4, .num_heads_kv = 2, .lengths_q = {3, 0, 150, 64, 1}, .lengths_k = {0, 7, 130, 64, 200}},
              dtype, Layout::kPadded);
    p.options.mask = Causal();
    p.check("packed");
    p.options.max_seqlen_q = 1000;  // an upper bound is enough
    p.options.max_seqlen_k = 999;
    p.check("packed, loose bounds");
  }
}

TEST_F(Attention, PackedRowsPastTheLastSequenceAreZero) {
  Problem p({.lengths_q = {30, 20}, .lengths_k = {10, 50}, .spare_rows = 100});
  p.check("spare rows");
  EXPECT_EQ(load(p.out.view(), {60, 0, 0}), 0);
  EXPECT_EQ(load(p.lse.view(), {0, 60}), -INFINITY);
  EXPECT_EQ(load(p.dk.view(), {159, 0, 0}), 0);
}

TEST_F(Attention, PackedEqualsBatched) {
  Problem batched({.batch = 3, .seqlen_q = 37, .seqlen_k = 53}),
      packed({.lengths_q = {37, 37, 37}, .lengths_k = {53, 53, 53}});
  for (Problem* p : {&batched, &packed}) {
    p->options.mask = SlidingWindow(20, 10);
    p->options.dropout_p = 0.2f;
    p->options.seed = 7;
    p->forward();
    p->backward();
  }
  // Same generator, same order: the values are the same, and so must be every bit of the results.
  EXPECT_EQ(batched.q.bytes(), packed.q.bytes());
  EXPECT_EQ(dense(batched.out.view()), dense(packed.out.view()));
  EXPECT_EQ(dense(batched.dq.view()), dense(packed.dq.view()));
  EXPECT_EQ(dense(batched.dk.view()), dense(packed.dk.view()));
  EXPECT_EQ(dense(batched.dv.view()), dense(packed.dv.view()));
}

TEST_F(Attention, BlockSparse) {
  std::mt19937 rng(5);
  for (int block : {16, 48, 64, 128}) {
    Problem p({.batch = 2,
               .seqlen_q = 300,
               .seqlen_k = 260,
               .num_heads = 2,
               .num_heads_kv = 1,
               .head_dim = 32,
               .head_dim_v = 32});
    const int rows = (300 + block - 1) / block, cols = (260 + block - 1) / block;
    std::vector<std::uint8_t> blocks(2 * 2 * rows * cols);
    for (auto& b : blocks) b = static_cast<std::uint8_t>(rng() % 3);
    const auto storage = BlockMaskStorage::from_dense(blocks.data(), 2, 2, rows, cols, block, block, Causal());
    p.options.mask = storage.view();
    p.check("blocks of " + std::to_string(block));
  }
}

TEST_F(Attention, SparseOfADenseLayoutIsDense) {
  const std::vector<std::uint8_t> full(4 * 5, 1);
  Problem dense_problem({.seqlen_q = 200, .seqlen_k = 300}), sparse({.seqlen_q = 200, .seqlen_k = 300});
  const auto storage = BlockMaskStorage::from_dense(full.data(), 1, 1, 4, 5, 64, 64);
  sparse.options.mask = storage.view();
  dense_problem.check("dense");
  sparse.check("a dense layout");
}

TEST_F(Attention, ALayoutThatWasCheckedIsTheSameMask) {
  std::mt19937 rng(41);
  std::vector<std::uint8_t> blocks(2 * 5 * 4);
  for (auto& b : blocks) b = static_cast<std::uint8_t>(rng() % 3);
  const auto storage = BlockMaskStorage::from_dense(blocks.data(), 1, 2, 5, 4, 32, 32, Causal());
  Problem p({.seqlen_q = 150, .seqlen_k = 120, .num_heads = 2, .num_heads_kv = 2, .head_dim = 32});
  p.options.mask = storage.view();
  p.forward();
  p.backward();
  const auto out = p.out.bytes(), dq = p.dq.bytes(), dk = p.dk.bytes();
  p.options.mask = CheckedBlockMask(storage.view());
  const ForwardArgs forward = p.forward_args();
  const BackwardArgs backward = p.backward_args();
  const Plan plans[] = {plan(forward), plan(backward)};
  for (int launches = 0; launches < 2; ++launches) {
    for (HostTensor* t : {&p.out, &p.dq, &p.dk}) t->fill(99);
    for (const Plan& each : plans) {
      const GuardedWorkspace workspace(each.workspace_size());
      each.launch(workspace.options());
    }
    EXPECT_EQ(p.out.bytes(), out);
    EXPECT_EQ(p.dq.bytes(), dq);
    EXPECT_EQ(p.dk.bytes(), dk);
  }
}

TEST_F(Attention, ScalesOfEitherSignAndZero) {
  for (float scale : {0.f, -0.3f, 2.f, 1e-6f}) {
    for (bool softcap : {false, true}) {
      Problem p({.seqlen_q = 33, .seqlen_k = 70});
      p.options.softmax_scale = scale;
      p.options.softcap = softcap ? 5.f : 0.f;
      p.options.mask = Causal();
      p.check("scale " + std::to_string(scale));
    }
  }
}

TEST_F(Attention, HugeLogits) {
  for (float size : {100.f, 1e5f, 1e9f}) {
    Problem p({.seqlen_q = 70, .seqlen_k = 300});
    p.q.fill_normal(p.rng(), size);
    p.k.fill_normal(p.rng(), size);
    p.forward();
    for (double x : dense(p.out.view())) ASSERT_TRUE(std::isfinite(x));
    const Reference expected(p.common());
    const std::vector<double> lse = dense(p.lse.view());
    for (std::size_t n = 0; n < lse.size(); ++n)
      ASSERT_NEAR(lse[n], expected.lse[n], 1e-6 * std::fabs(expected.lse[n])) << size;
  }
}

// Equal scores over many tiles: rescaling by anything but one where the maximum stays would favour late or early keys.
TEST_F(Attention, LongSequencesDoNotDrift) {
  constexpr int kKeys = 40000;
  for (float score : {0.f, 1.2345678f, -17.654321f, 103.45678f, 1234.5678f}) {
    Problem p({.seqlen_q = 3, .seqlen_k = kKeys, .num_heads = 1, .num_heads_kv = 1, .head_dim = 1, .head_dim_v = 1});
    p.q.fill(1);
    p.k.fill(score);
    const TensorView v = p.v.view();
    for (std::int64_t j = 0; j < kKeys; ++j) store(v, {0, j, 0, 0}, j < kKeys / 2 ? 1 : -1);
    p.forward();
    EXPECT_NEAR(load(p.out.view(), {0, 1, 0, 0}), 0, 5e-6) << "score " << score;
    const double lse = score + std::log(kKeys);
    EXPECT_NEAR(load(p.lse.view(), {0, 0, 1}), lse, 4e-7 * std::fabs(lse)) << "score " << score;
  }
}

// Everything at once, at random; a failure names its seed.
void check_random_problem(unsigned seed) {
  std::mt19937 rng(seed);
  auto between = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); };
  auto chance = [&](int percent) { return between(0, 99) < percent; };

  Shape shape;
  shape.num_heads_kv = between(1, 2);
  shape.num_heads = shape.num_heads_kv * between(1, 3);
  shape.head_dim = chance(50) ? 64 : between(1, 140);
  shape.head_dim_v = chance(50) ? shape.head_dim : between(1, 140);
  shape.batch = between(1, 2);
  shape.seqlen_q = between(1, 150);
  shape.seqlen_k = chance(30) ? shape.seqlen_q : between(1, 250);
  if (chance(30)) {
    shape.spare_rows = chance(20) ? 30 : 0;
    for (int n = between(1, 4); n > 0; --n) {
      shape.lengths_q.push_back(between(0, 100));
      shape.lengths_k.push_back(between(0, 100));
    }
  }
  const DType dtype = kDTypes[between(0, 2)];
  const Layout layouts[] = {Layout::kContiguous, Layout::kPadded, Layout::kHeadsFirst, Layout::kReversed};
  Problem p(shape, dtype, layouts[between(0, 3)], seed);
  p.with_dlse = chance(30);

  const std::int64_t batch = shape.packed() ? static_cast<std::int64_t>(shape.lengths_q.size()) : shape.batch;
  const std::int64_t seqlen_q = shape.packed() ? p.options.max_seqlen_q : shape.seqlen_q;
  const std::int64_t seqlen_k = shape.packed() ? p.options.max_seqlen_k : shape.seqlen_k;
  std::optional<BlockMaskStorage> storage;
  auto limit = [&]() -> std::optional<std::int64_t> {
    return chance(30) ? std::nullopt : std::optional<std::int64_t>(between(-20, 100));
  };
  const Band band{limit(), limit(), chance(50) ? Alignment::kBottomRight : Alignment::kTopLeft};
  const int kind = between(0, 3);
  if (kind == 1) p.options.mask = Causal();
  if (kind == 2) p.options.mask = band;
  if (kind == 3) {
    const int block_q = 16 * between(1, 5), block_k = 16 * between(1, 5);
    const int rows = static_cast<int>((seqlen_q + block_q - 1) / block_q);
    const int cols = static_cast<int>((seqlen_k + block_k - 1) / block_k);
    const int batches = chance(50) ? 1 : static_cast<int>(batch),
              heads = chance(50) ? 1 : static_cast<int>(shape.num_heads);
    std::vector<std::uint8_t> blocks(static_cast<std::size_t>(batches) * heads * rows * cols);
    for (auto& b : blocks) b = static_cast<std::uint8_t>(between(0, 2));
    storage = BlockMaskStorage::from_dense(blocks.data(), batches, heads, rows, cols, block_q, block_k, band);
    p.options.mask = storage->view();
  }
  if (chance(20)) p.options.softcap = 3;
  if (chance(20)) p.options.softmax_scale = chance(50) ? -0.2f : 0.4f;
  if (chance(30)) {
    const DType types[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kBool};
    auto extent = [&](std::int64_t n) { return chance(40) ? std::int64_t{1} : n; };
    p.bias =
        HostTensor(types[between(0, 3)], {extent(batch), extent(shape.num_heads), extent(seqlen_q), extent(seqlen_k)});
    p.bias.fill_normal(rng);
    if (p.bias.view().dtype == DType::kBool) {
      const TensorView view = p.bias.view();
      for_each_index(view, [&](const Index& index) { store(view, index, chance(70)); });
    }
  }
  if (chance(20)) {
    p.alibi = chance(50) ? HostTensor(DType::kFloat32, {shape.num_heads})
                         : HostTensor(DType::kFloat32, {batch, shape.num_heads});
    p.alibi.fill_normal(rng, 0.1);
  }
  if (chance(25)) {
    p.options.dropout_p = static_cast<float>(between(1, 90)) / 100;
    p.options.seed = (static_cast<std::uint64_t>(rng()) << 32) + rng();
    p.seeds.resize(2 * static_cast<std::size_t>(batch));
    for (std::uint64_t& word : p.seeds) word = (static_cast<std::uint64_t>(rng()) << 32) + rng();
    const int kind = between(0, 2);  // in the arguments, in memory, in memory and of each sequence
    if (kind == 1) p.options.seed_tensor = {p.seeds.data(), DType::kUInt64, {2}};
    if (kind == 2) p.options.seed_tensor = {p.seeds.data(), DType::kInt64, {batch, 2}};
    p.options.offset = (static_cast<std::uint64_t>(rng()) << 32) + rng();
  }
  p.check("seed " + std::to_string(seed));
}

// Watched, a problem takes seven times as long, most of it in the reference.
#if defined(__SANITIZE_ADDRESS__)
constexpr unsigned kRandomProblems = 100;
#else
constexpr unsigned kRandomProblems = 300;
#endif

TEST_F(Attention, RandomProblems) {
  for (unsigned seed = 0; seed < kRandomProblems && !HasFailure(); ++seed) check_random_problem(seed);
}

}  // namespace
}  // namespace flashsdk::testing
