// The C API: every argument reaches the kernels, and results are those of the C++ API.
#include "flashsdk/c_api.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c_call.h"
#include "flashsdk/flashsdk.h"
#include "problem.h"

extern "C" flashsdk_status attend_in_c(const float* q, const float* k, const float* v, float* out, float* lse);

namespace flashsdk::testing {
namespace {

using MakePlan = decltype(flashsdk_plan_forward);
using AskSize = decltype(flashsdk_workspace_size_forward);

void run(const BackwardArgs& args, MakePlan make, AskSize ask) {
  CCall call(args);
  std::size_t asked = 0;
  ASSERT_EQ(ask(&call.args, &asked), FLASHSDK_OK) << flashsdk_last_error();
  flashsdk_plan* made = nullptr;
  ASSERT_EQ(make(&call.args, &made), FLASHSDK_OK) << flashsdk_last_error();
  const PlanPtr plan(made);
  EXPECT_EQ(flashsdk_plan_workspace_size(made), asked);
  call.forget();
  EXPECT_EQ(launch(made), FLASHSDK_OK) << flashsdk_last_error();
}

// Forward and backward in C, against the definition.
void check(Problem& problem, const std::string& name) {
  problem.check(
      name, [&] { run(problem.backward_args(), flashsdk_plan_forward, flashsdk_workspace_size_forward); },
      [&] { run(problem.backward_args(), flashsdk_plan_backward, flashsdk_workspace_size_backward); });
}

using Change = std::function<void(Problem&)>;

TEST(CApi, DtypesAndStrides) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (Layout layout : {Layout::kContiguous, Layout::kPadded, Layout::kHeadsFirst, Layout::kReversed}) {
      Problem problem({2, 37, 53, 4, 2, 24, 40}, dtype, layout);
      check(problem, to_string(dtype));
    }
  }
}

TEST(CApi, EveryArgument) {
  const auto band = [](std::optional<std::int64_t> left, std::optional<std::int64_t> right, Alignment alignment) {
    return [=](Problem& p) { p.options.mask = SlidingWindow(left, right, alignment); };
  };
  const auto alibi = [](std::vector<std::int64_t> shape) {
    return [=](Problem& p) { p.alibi = HostTensor(DType::kFloat32, shape).fill_normal(p.rng()); };
  };
  const auto bias = [](DType dtype, std::vector<std::int64_t> shape) {
    return [=](Problem& p) {
      p.bias = HostTensor(dtype, shape);
      dtype == DType::kBool ? p.bias.fill(1) : p.bias.fill_normal(p.rng());
      if (dtype == DType::kBool) store(p.bias.view(), {0, 0, 3, 5}, 0);
    };
  };
  const auto seeds = [](std::vector<std::int64_t> shape) {
    return [=](Problem& p) {
      p.options.dropout_p = 0.5;
      p.seeds = {11, 5, 12, 6};
      p.options.seed_tensor = TensorView(p.seeds.data(), DType::kInt64, {2});
      if (shape.size() == 2) p.options.seed_tensor = TensorView(p.seeds.data(), DType::kUInt64, {shape[0], 2});
    };
  };
  const std::vector<std::pair<const char*, Change>> cases{
      {"dense", [](Problem&) {}},
      {"causal", band(std::nullopt, 0, Alignment::kBottomRight)},
      {"causal, top left", band(std::nullopt, 0, Alignment::kTopLeft)},
      {"window", band(7, 3, Alignment::kBottomRight)},
      {"only a left limit", band(9, std::nullopt, Alignment::kTopLeft)},
      {"a band without limits", band(std::nullopt, std::nullopt, Alignment::kBottomRight)},
      {"negative limits", band(-2, 30, Alignment::kTopLeft)},
      {"scale", [](Problem& p) { p.options.softmax_scale = 0.3; }},
      {"scale 0", [](Problem& p) { p.options.softmax_scale = 0.; }},
      {"softcap", [](Problem& p) { p.options.softcap = 1.5; }},
      {"bias", bias(DType::kFloat32, {2, 4, 40, 56})},
      {"broadcast bias", bias(DType::kBFloat16, {1, 1, 40, 56})},
      {"bool bias", bias(DType::kBool, {1, 1, 40, 56})},
      {"alibi", alibi({4})},
      {"alibi of each sequence", alibi({2, 4})},
      {"dropout",
       [](Problem& p) {
         p.options.dropout_p = 0.25;
         p.options.seed = 0x123456789abcdefULL;
         p.options.offset = 3;
       }},
      {"seeds in a tensor", seeds({2})},
      {"seeds of each sequence", seeds({2, 2})},
      {"deterministic", [](Problem& p) { p.options.deterministic = true; }},
      {"backend", [](Problem& p) { p.options.backend = "cpu"; }},
      {"dlse", [](Problem& p) { p.with_dlse = true; }},
  };
  for (const auto& [name, change] : cases) {
    Problem problem({2, 40, 56, 4, 2, 32, 32});
    change(problem);
    check(problem, name);
  }
}

TEST(CApi, PackedSequences) {
  Shape shape;
  shape.num_heads = 4;
  shape.num_heads_kv = 2;
  shape.lengths_q = {5, 0, 33};
  shape.lengths_k = {17, 9, 40};
  shape.spare_rows = 2;
  for (const Mask& mask : {Mask(Dense{}), Mask(Causal())}) {
    Problem problem(shape);
    problem.options.mask = mask;
    check(problem, "packed");
  }
}

// What the definition here does not have: the bits that the C++ API writes, which differ from those without.
TEST(CApi, SinksAndUsedLengths) {
  Problem problem({2, 24, 40, 4, 2, 32, 32});
  const std::vector<std::int32_t> used_q{24, 11}, used_k{7, 33};
  HostTensor sink(DType::kFloat32, {4}), dsink(DType::kFloat32, {4});
  sink.fill_normal(problem.rng());
  const auto lengths = [](const std::vector<std::int32_t>& of) {
    return TensorView(const_cast<std::int32_t*>(of.data()), DType::kInt32, {2});
  };
  const auto results = [&](const BackwardArgs& args, auto forward, auto backward) {
    std::vector<std::vector<unsigned char>> bytes;
    for (HostTensor* t : {&problem.out, &problem.lse, &problem.dq, &problem.dk, &problem.dv, &dsink}) t->fill(NAN);
    forward(args);
    backward(args);
    for (const HostTensor* t : {&problem.out, &problem.lse, &problem.dq, &problem.dk, &problem.dv, &dsink})
      bytes.push_back(t->bytes());
    return bytes;
  };
  const auto in_cpp = [&](const BackwardArgs& args) {
    return results(
        args,
        [&](const BackwardArgs& a) {
          ForwardArgs f;
          static_cast<AttentionArgs&>(f) = a;
          f.out = a.out;
          f.lse = a.lse;
          mha_fwd(f, GuardedWorkspace(workspace_size(f)).options());
        },
        [](const BackwardArgs& a) { mha_bwd(a, GuardedWorkspace(workspace_size(a)).options()); });
  };
  const auto in_c = [&](const BackwardArgs& args) {
    return results(
        args, [](const auto& a) { run(a, flashsdk_plan_forward, flashsdk_workspace_size_forward); },
        [](const auto& a) { run(a, flashsdk_plan_backward, flashsdk_workspace_size_backward); });
  };
  const BackwardArgs plain = problem.backward_args();
  BackwardArgs of_q = plain, of_k = plain, of_sink = plain;
  of_q.seqused_q = lengths(used_q);
  of_k.seqused_k = lengths(used_k);
  of_sink.sink = sink.view();
  of_sink.dsink = dsink.view();
  for (const BackwardArgs& args : {of_q, of_k, of_sink}) {
    EXPECT_EQ(in_c(args), in_cpp(args));
    EXPECT_NE(in_c(args), in_cpp(plain));
  }
}

// Pages that lie in order are the tensor that they were cut from.
TEST(CApi, PagesOfABlockTable) {
  Problem problem({2, 3, 32, 2, 2, 16, 16});
  problem.forward();
  const std::vector<unsigned char> expected = problem.out.bytes();
  std::vector<std::int32_t> table{0, 1, 2, 3}, used{32, 32};
  const auto pages = [](const HostTensor& t) { return TensorView(t.view().data, DType::kFloat32, {4, 16, 2, 16}); };
  BackwardArgs args = problem.backward_args();
  args.k = pages(problem.k);
  args.v = pages(problem.v);
  args.seqused_k = TensorView(used.data(), DType::kInt32, {2});
  args.block_table = TensorView(table.data(), DType::kInt32, {2, 2});
  args.num_splits = 1;
  problem.out.fill(NAN);
  run(args, flashsdk_plan_forward, flashsdk_workspace_size_forward);
  EXPECT_EQ(problem.out.bytes(), expected);
}

// Of which the definition here has no factors: the bits that the C++ API writes, which differ from those without.
TEST(CApi, KeysOf8Bits) {
  Problem problem({2, 3, 32, 4, 2, 16, 24}, DType::kBFloat16);
  HostTensor k(DType::kFloat8E4M3, {2, 32, 2, 16}, Layout::kPadded), v(DType::kFloat8E4M3, {2, 32, 2, 24});
  HostTensor k_descale(DType::kFloat32, {2, 2}, Layout::kPadded), v_descale(DType::kFloat32, {1, 2});
  for (HostTensor* t : {&k, &v}) t->fill_normal(problem.rng(), 4);
  for (HostTensor* t : {&k_descale, &v_descale}) t->fill_normal(problem.rng());
  ForwardArgs plain = problem.forward_args();
  plain.k = k.view();
  plain.v = v.view();
  ForwardArgs of_k = plain, of_v = plain;
  of_k.k_descale = k_descale.view();
  of_v.v_descale = v_descale.view();
  const auto in_cpp = [&](const ForwardArgs& args) {
    problem.out.fill(NAN);
    mha_fwd(args, GuardedWorkspace(workspace_size(args)).options());
    return problem.out.bytes();
  };
  for (const ForwardArgs& args : {plain, of_k, of_v}) {
    const std::vector<unsigned char> expected = in_cpp(args);
    problem.out.fill(NAN);
    BackwardArgs in_c;
    static_cast<AttentionArgs&>(in_c) = args;
    in_c.out = args.out;
    in_c.lse = args.lse;
    run(in_c, flashsdk_plan_forward, flashsdk_workspace_size_forward);
    EXPECT_EQ(problem.out.bytes(), expected);
  }
  EXPECT_NE(in_cpp(of_k), in_cpp(plain));
  EXPECT_NE(in_cpp(of_v), in_cpp(plain));
}

TEST(CApi, BlockMasks) {
  const std::vector<std::uint8_t> blocks{1, 0, 2, 2, 1, 0, 0, 2, 1};
  for (const auto& band : {std::optional<Band>(), std::optional<Band>(Causal())}) {
    const auto storage = BlockMaskStorage::from_dense(blocks.data(), 1, 1, 3, 3, 16, 16, band);
    Problem problem({1, 48, 48, 2, 2, 32, 32});
    BlockMask mask = storage.view();
    mask.seqlen_q = mask.seqlen_k = 48;
    problem.options.mask = mask;
    check(problem, "lists of the caller");
  }
}

// The lists that C makes are those that C++ makes.
TEST(CApi, BlockListsFromADenseMatrix) {
  const std::vector<std::uint8_t> blocks{1, 0, 2, 2, 1, 0, 0, 2, 1};
  const Blocks made(blocks, 3, 3, 16);
  const auto storage = BlockMaskStorage::from_dense(blocks.data(), 1, 1, 3, 3, 16, 16);
  const BlockMask expected = storage.view();
  EXPECT_EQ(made.mask.struct_size, sizeof made.mask);
  EXPECT_EQ(made.mask.block_q, 16);
  EXPECT_EQ(made.mask.block_k, 16);
  EXPECT_EQ(made.mask.seqlen_q, 0);
  const auto same = [](const flashsdk_tensor* ours, const TensorView& theirs) {
    const TensorView view(ours);
    return view.dtype == theirs.dtype && view.rank == theirs.rank && view.shape == theirs.shape &&
           dense(view) == dense(theirs);
  };
  EXPECT_TRUE(same(made.mask.row_partial_offsets, expected.row_partial.offsets));
  EXPECT_TRUE(same(made.mask.row_partial_indices, expected.row_partial.indices));
  EXPECT_TRUE(same(made.mask.row_full_offsets, expected.row_full.offsets));
  EXPECT_TRUE(same(made.mask.row_full_indices, expected.row_full.indices));
  EXPECT_TRUE(same(made.mask.col_partial_offsets, expected.col_partial.offsets));
  EXPECT_TRUE(same(made.mask.col_partial_indices, expected.col_partial.indices));
  EXPECT_TRUE(same(made.mask.col_full_offsets, expected.col_full.offsets));
  EXPECT_TRUE(same(made.mask.col_full_indices, expected.col_full.indices));
}

TEST(CApi, CompiledAsC) {
  const float q[8] = {1}, k[8] = {2}, v[8] = {3, 4, 5, 6, 7, 8, 9, 10};
  float out[8] = {}, lse[1] = {};
  ASSERT_EQ(attend_in_c(q, k, v, out, lse), FLASHSDK_OK) << flashsdk_last_error();
  for (int c = 0; c < 8; ++c) EXPECT_EQ(out[c], v[c]);
  EXPECT_FLOAT_EQ(lse[0], 2 / std::sqrt(8.f));
}

TEST(CApi, Versions) {
  EXPECT_STREQ(flashsdk_version(), FLASHSDK_VERSION);
  EXPECT_EQ(flashsdk_version_number(),
            10000 * FLASHSDK_VERSION_MAJOR + 100 * FLASHSDK_VERSION_MINOR + FLASHSDK_VERSION_PATCH);
  EXPECT_STREQ(flashsdk_status_name(FLASHSDK_OK), "ok");
  EXPECT_STREQ(flashsdk_status_name(FLASHSDK_INVALID_ARGUMENT), "invalid_argument");
  EXPECT_STREQ(flashsdk_status_name(FLASHSDK_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(flashsdk_status_name(FLASHSDK_RUNTIME), "runtime");
  EXPECT_STREQ(flashsdk_status_name(-1), "unknown");
}

TEST(CApi, ExplainIsAsSnprintf) {
  Problem problem({});
  CCall call(problem.backward_args());
  const flashsdk_attention_args& args = call.args;
  for (const auto explain : {flashsdk_explain_forward, flashsdk_explain_backward}) {
    std::size_t length = 0;
    ASSERT_EQ(explain(&args, nullptr, 0, &length), FLASHSDK_OK) << flashsdk_last_error();
    ASSERT_GT(length, 20u);
    std::vector<char> whole(length + 1, '#'), part(8, '#');
    ASSERT_EQ(explain(&args, whole.data(), whole.size(), nullptr), FLASHSDK_OK);
    const std::string text = whole.data();
    EXPECT_EQ(text.size(), length);
    EXPECT_EQ(text.rfind("cpu_", 0), 0u) << text;
    EXPECT_NE(text.find(" queries x "), std::string::npos) << text;
    std::size_t same = 0;
    ASSERT_EQ(explain(&args, part.data(), 4, &same), FLASHSDK_OK);
    EXPECT_EQ(same, length);
    EXPECT_EQ(std::string(part.data()), text.substr(0, 3));
    EXPECT_EQ(part[4], '#') << "wrote past the buffer";
  }
}

TEST(CApi, ExplainSaysWhyNot) {
  Problem problem({});
  CCall call(problem.backward_args());
  char text[4096];
  ASSERT_EQ(flashsdk_explain_forward(&call.args, text, sizeof text, nullptr), FLASHSDK_OK);
  const Explanation why = explain(problem.forward_args());
  for (const auto& refusal : why.refused)
    EXPECT_NE(std::string(text).find("\n  not " + refusal.kernel + ": " + refusal.reason), std::string::npos) << text;
}

TEST(CApi, NumThreads) {
  const int before = flashsdk_get_num_threads();
  EXPECT_EQ(before, get_num_threads());
  EXPECT_EQ(flashsdk_set_num_threads(3), FLASHSDK_OK);
  EXPECT_EQ(flashsdk_get_num_threads(), 3);
  EXPECT_EQ(flashsdk_set_num_threads(before), FLASHSDK_OK);
}

}  // namespace
}  // namespace flashsdk::testing
