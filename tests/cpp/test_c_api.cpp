// The C API: every argument reaches the kernels, structs of other versions are understood, failures are a status and a
// line.
#include "flashsdk/c_api.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "flashsdk/flashsdk.h"
#include "problem.h"

extern "C" flashsdk_status attend_in_c(const float* q, const float* k, const float* v, float* out, float* lse);

namespace flashsdk::testing {
namespace {

// ---- the layout of a published field never changes; those of later versions stand behind

#define FLASHSDK_EXPECT_AT(offset, field) \
  static_assert(sizeof(void*) != 8 || offsetof(flashsdk_attention_args, field) == (offset), "an old program breaks")
FLASHSDK_EXPECT_AT(0, struct_size);
FLASHSDK_EXPECT_AT(8, q);
FLASHSDK_EXPECT_AT(16, k);
FLASHSDK_EXPECT_AT(24, v);
FLASHSDK_EXPECT_AT(32, out);
FLASHSDK_EXPECT_AT(40, lse);
FLASHSDK_EXPECT_AT(48, dout);
FLASHSDK_EXPECT_AT(56, dlse);
FLASHSDK_EXPECT_AT(64, dq);
FLASHSDK_EXPECT_AT(72, dk);
FLASHSDK_EXPECT_AT(80, dv);
FLASHSDK_EXPECT_AT(88, softmax_scale);
FLASHSDK_EXPECT_AT(96, softcap);
FLASHSDK_EXPECT_AT(104, band);
FLASHSDK_EXPECT_AT(112, block_mask);
FLASHSDK_EXPECT_AT(120, bias);
FLASHSDK_EXPECT_AT(128, alibi_slopes);
FLASHSDK_EXPECT_AT(136, dropout_p);
FLASHSDK_EXPECT_AT(144, seed);
FLASHSDK_EXPECT_AT(152, offset);
FLASHSDK_EXPECT_AT(160, seed_tensor);
FLASHSDK_EXPECT_AT(168, cu_seqlens_q);
FLASHSDK_EXPECT_AT(176, cu_seqlens_k);
FLASHSDK_EXPECT_AT(184, max_seqlen_q);
FLASHSDK_EXPECT_AT(192, max_seqlen_k);
FLASHSDK_EXPECT_AT(200, backend);
FLASHSDK_EXPECT_AT(208, deterministic);
FLASHSDK_EXPECT_AT(212, num_splits);
constexpr std::size_t kFirstArgsSize = 216;
FLASHSDK_EXPECT_AT(216, seqused_q);
FLASHSDK_EXPECT_AT(224, seqused_k);
FLASHSDK_EXPECT_AT(232, sink);
FLASHSDK_EXPECT_AT(240, dsink);
FLASHSDK_EXPECT_AT(248, block_table);
static_assert(sizeof(void*) != 8 || (sizeof(flashsdk_band) == 32 && sizeof(flashsdk_block_mask) == 96));

// ---- a call in C, from one in C++

class CCall {
 public:
  flashsdk_attention_args args{};

  // Of the forward's and the backward's tensors; the mask's lists are those of `args`, too.
  explicit CCall(const BackwardArgs& a) {
    args.struct_size = sizeof args;
    args.q = tensor(a.q);
    args.k = tensor(a.k);
    args.v = tensor(a.v);
    args.out = tensor(a.out);
    args.lse = tensor(a.lse);
    args.dout = tensor(a.dout);
    args.dlse = tensor(a.dlse);
    args.dq = tensor(a.dq);
    args.dk = tensor(a.dk);
    args.dv = tensor(a.dv);
    if (a.softmax_scale) args.softmax_scale = &(scale_ = *a.softmax_scale);
    args.softcap = a.softcap;
    args.bias = tensor(a.bias);
    args.alibi_slopes = tensor(a.alibi_slopes);
    args.dropout_p = a.dropout_p;
    args.seed = a.seed;
    args.offset = a.offset;
    args.seed_tensor = tensor(a.seed_tensor);
    args.cu_seqlens_q = tensor(a.cu_seqlens_q);
    args.cu_seqlens_k = tensor(a.cu_seqlens_k);
    args.seqused_q = tensor(a.seqused_q);
    args.seqused_k = tensor(a.seqused_k);
    args.sink = tensor(a.sink);
    args.dsink = tensor(a.dsink);
    args.block_table = tensor(a.block_table);
    args.num_splits = a.num_splits;
    args.max_seqlen_q = a.max_seqlen_q;
    args.max_seqlen_k = a.max_seqlen_k;
    args.deterministic = a.deterministic ? 1 : 0;
    backend_ = a.backend;
    if (!backend_.empty()) args.backend = backend_.c_str();
    if (const auto* b = std::get_if<Band>(&a.mask)) args.band = band(*b);
    if (const auto* m = std::get_if<BlockMask>(&a.mask)) args.block_mask = block_mask(*m);
  }
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;

  // What a caller may do once it has its plan.
  void forget() {
    for (flashsdk_tensor& t : tensors_) std::memset(&t, 0xFF, sizeof t);
    for (TensorView& v : views_) v = {};
    std::memset(&args, 0xFF, sizeof args);
    std::memset(&band_, 0xFF, sizeof band_);
    std::memset(&block_mask_, 0xFF, sizeof block_mask_);
    backend_.assign(backend_.size(), '?');
    scale_ = NAN;
  }

  const flashsdk_tensor* tensor(const TensorView& view) {
    if (!view.given()) return nullptr;
    views_.push_back(view);
    flashsdk_tensor t{};
    // Half of the address in the offset, as slices of frameworks have it.
    t.data = static_cast<char*>(view.data) - 64;
    t.byte_offset = 64;
    t.device.device_type = FLASHSDK_CPU;
    t.ndim = view.rank;
    t.dtype = dtype(view.dtype);
    t.shape = views_.back().shape.data();
    t.strides = views_.back().stride.data();
    tensors_.push_back(t);
    return &tensors_.back();
  }

 private:
  static decltype(flashsdk_tensor::dtype) dtype(DType d) {
    switch (d) {
      case DType::kFloat32:
        return {FLASHSDK_FLOAT, 32, 1};
      case DType::kFloat16:
        return {FLASHSDK_FLOAT, 16, 1};
      case DType::kBFloat16:
        return {FLASHSDK_BFLOAT, 16, 1};
      case DType::kInt32:
        return {FLASHSDK_INT, 32, 1};
      case DType::kBool:
        return {FLASHSDK_BOOL, 8, 1};
      case DType::kInt64:
        return {FLASHSDK_INT, 64, 1};
      case DType::kUInt64:
        return {FLASHSDK_UINT, 64, 1};
    }
    return {};
  }
  const flashsdk_band* band(const Band& b) {
    band_ = {sizeof band_, b.left.value_or(FLASHSDK_UNLIMITED), b.right.value_or(FLASHSDK_UNLIMITED),
             b.alignment == Alignment::kTopLeft ? FLASHSDK_TOP_LEFT : FLASHSDK_BOTTOM_RIGHT, 0};
    return &band_;
  }
  const flashsdk_block_mask* block_mask(const BlockMask& m) {
    block_mask_.struct_size = sizeof block_mask_;
    block_mask_.block_q = m.block_q;
    block_mask_.block_k = m.block_k;
    block_mask_.row_partial_offsets = tensor(m.row_partial.offsets);
    block_mask_.row_partial_indices = tensor(m.row_partial.indices);
    block_mask_.row_full_offsets = tensor(m.row_full.offsets);
    block_mask_.row_full_indices = tensor(m.row_full.indices);
    block_mask_.col_partial_offsets = tensor(m.col_partial.offsets);
    block_mask_.col_partial_indices = tensor(m.col_partial.indices);
    block_mask_.col_full_offsets = tensor(m.col_full.offsets);
    block_mask_.col_full_indices = tensor(m.col_full.indices);
    block_mask_.seqlen_q = m.seqlen_q;
    block_mask_.seqlen_k = m.seqlen_k;
    if (m.band) args.band = band(*m.band);
    return &block_mask_;
  }

  std::deque<TensorView> views_;  // whose elements stay where they are
  std::deque<flashsdk_tensor> tensors_;
  flashsdk_band band_{};
  flashsdk_block_mask block_mask_{};
  std::string backend_;
  double scale_ = 0;
};

struct Destroy {
  void operator()(flashsdk_plan* plan) const { flashsdk_plan_destroy(plan); }
  void operator()(flashsdk_block_lists* lists) const { flashsdk_block_lists_destroy(lists); }
};
using PlanPtr = std::unique_ptr<flashsdk_plan, Destroy>;
using MakePlan = decltype(flashsdk_plan_forward);
using AskSize = decltype(flashsdk_workspace_size_forward);

flashsdk_status launch(const flashsdk_plan* plan) {
  GuardedWorkspace workspace(flashsdk_plan_workspace_size(plan));
  const Workspace w = workspace.options().workspace;
  const flashsdk_status status = flashsdk_plan_launch(plan, w.data, w.size, nullptr);
  EXPECT_TRUE(workspace.guard_untouched());
  return status;
}

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

class Blocks {
 public:
  explicit Blocks(std::vector<std::uint8_t> blocks, int rows, int cols, int size) {
    flashsdk_block_lists* made = nullptr;
    EXPECT_EQ(flashsdk_block_lists_create(blocks.data(), 1, 1, rows, cols, size, size, &made), FLASHSDK_OK);
    lists.reset(made);
    mask.struct_size = sizeof mask;
    EXPECT_EQ(flashsdk_block_lists_mask(made, &mask), FLASHSDK_OK) << flashsdk_last_error();
  }
  std::unique_ptr<flashsdk_block_lists, Destroy> lists;
  flashsdk_block_mask mask{};
};

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

// ---- structs of other versions

flashsdk_status plan_of(const void* args) {
  flashsdk_plan* plan = nullptr;
  const flashsdk_status status = flashsdk_plan_forward(static_cast<const flashsdk_attention_args*>(args), &plan);
  EXPECT_EQ(plan != nullptr, status == FLASHSDK_OK);
  flashsdk_plan_destroy(plan);
  return status;
}

// The caller's struct in memory of exactly its size, the rest of which a sanitizer guards.
std::unique_ptr<unsigned char[]> sized(const flashsdk_attention_args& args, std::size_t size) {
  std::unique_ptr<unsigned char[]> memory(new unsigned char[size]());
  std::memcpy(memory.get(), &args, std::min(size, sizeof args));
  std::memcpy(memory.get(), &size, sizeof size);
  return memory;
}

TEST(CApi, AnOlderCallersStruct) {
  Problem problem({});
  const CCall call(problem.backward_args());
  if (sizeof(void*) != 8) GTEST_SKIP() << "its size is that of 64 bits";
  const auto older = sized(call.args, kFirstArgsSize);  // which a sanitizer guards the end of
  EXPECT_EQ(plan_of(older.get()), FLASHSDK_OK) << flashsdk_last_error();
}

TEST(CApi, ANewerCallersStruct) {
  Problem problem({});
  const CCall call(problem.backward_args());
  const std::size_t size = sizeof call.args + 24;
  const auto memory = sized(call.args, size);
  EXPECT_EQ(plan_of(memory.get()), FLASHSDK_OK) << flashsdk_last_error();
  memory[size - 1] = 1;
  EXPECT_EQ(plan_of(memory.get()), FLASHSDK_UNSUPPORTED);
  EXPECT_STREQ(flashsdk_last_error(),
               "args: a field that flashsdk " FLASHSDK_VERSION " does not know; a newer flashsdk");
}

TEST(CApi, ANewerCallersMaskIsFilled) {
  const Blocks made({1}, 1, 1, 16);
  struct {
    flashsdk_block_mask mask;
    std::int64_t later = -1, beyond = -1;
  } newer{};
  newer.mask.struct_size = sizeof newer.mask + sizeof newer.later;
  newer.later = newer.beyond = -1;
  ASSERT_EQ(flashsdk_block_lists_mask(made.lists.get(), &newer.mask), FLASHSDK_OK);
  EXPECT_EQ(newer.mask.struct_size, sizeof newer.mask + sizeof newer.later);
  EXPECT_EQ(newer.mask.block_q, 16);
  EXPECT_EQ(newer.later, 0);
  EXPECT_EQ(newer.beyond, -1);
}

TEST(CApi, SizesThatAreNone) {
  Problem problem({});
  CCall call(problem.backward_args());
  for (std::size_t size : {std::size_t{0}, std::size_t{8}, std::size_t{1} << 40}) {
    call.args.struct_size = size;
    EXPECT_EQ(plan_of(&call.args), FLASHSDK_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(flashsdk_last_error()).rfind("args.struct_size: " + std::to_string(size) + "; ", 0), 0u)
        << flashsdk_last_error();
  }
}

// ---- failures

struct WrongCall {
  const char* line;
  std::function<void(CCall&)> spoil;
  flashsdk_status status = FLASHSDK_INVALID_ARGUMENT;
};

// A copy of one of the call's tensors, to spoil.
flashsdk_tensor& copy_of(CCall& call, const flashsdk_tensor*& field) {
  flashsdk_tensor t = *field;
  auto* copy = const_cast<flashsdk_tensor*>(call.tensor(TensorView(field)));
  *copy = t;
  field = copy;
  return *copy;
}

TEST(CApi, WhatIsWrongIsOneLine) {
  static const flashsdk_band kBand{sizeof(flashsdk_band), 1, 1, 7, 0};
  static const flashsdk_band kReserved{sizeof(flashsdk_band), 1, 1, 0, 1};
  static const flashsdk_band kSizeless{};
  static const flashsdk_block_mask kNoLists = [] {
    flashsdk_block_mask mask{};
    mask.struct_size = sizeof mask;
    mask.block_q = mask.block_k = 16;
    return mask;
  }();
  const std::vector<WrongCall> calls{
      {"q: not given; a tensor", [](CCall& c) { c.args.q = nullptr; }},
      {"lse: not given; a tensor", [](CCall& c) { c.args.lse = nullptr; }},
      {"q.shape: a null pointer; 4 extents", [](CCall& c) { copy_of(c, c.args.q).shape = nullptr; }},
      {"k: 6 dimensions; at most 5", [](CCall& c) { copy_of(c, c.args.k).ndim = 6; }},
      {"k: -1 dimensions; at most 5", [](CCall& c) { copy_of(c, c.args.k).ndim = -1; }},
      {"v: dtype int8; float32, float16, bfloat16, int32, int64, uint64 or bool",
       [](CCall& c) { copy_of(c, c.args.v).dtype = {FLASHSDK_INT, 8, 1}; }},
      {"v: dtype int32; float32, the dtype of q", [](CCall& c) { copy_of(c, c.args.v).dtype = {FLASHSDK_INT, 32, 1}; }},
      {"out: on DLPack device type 7; the CPU (1) or CUDA (2, 13)",
       [](CCall& c) { copy_of(c, c.args.out).device.device_type = 7; }},
      {"softcap: -1; a finite number >= 0", [](CCall& c) { c.args.softcap = -1; }},
      {"dropout_p: 1; 0 <= dropout_p < 1", [](CCall& c) { c.args.dropout_p = 1; }},
      {"max_seqlen_q: 3; 0, as cu_seqlens_q and cu_seqlens_k are not given", [](CCall& c) { c.args.max_seqlen_q = 3; }},
      {"backend: sm75; \"cpu\", \"sm80\", \"sm90\" or none", [](CCall& c) { c.args.backend = "sm75"; }},
      {"num_splits: -1; 0 or more", [](CCall& c) { c.args.num_splits = -1; }},
      {"band.alignment: 7; FLASHSDK_BOTTOM_RIGHT (0) or FLASHSDK_TOP_LEFT (1)", [](CCall& c) { c.args.band = &kBand; }},
      {"band.reserved: 1; 0", [](CCall& c) { c.args.band = &kReserved; }},
      {"band.struct_size: 0; 32 to 4096, the size of the struct", [](CCall& c) { c.args.band = &kSizeless; }},
      {"mask.row_partial.offsets: not given; a tensor", [](CCall& c) { c.args.block_mask = &kNoLists; }},
  };
  Problem problem({});
  for (const WrongCall& wrong : calls) {
    CCall call(problem.backward_args());
    wrong.spoil(call);
    EXPECT_EQ(plan_of(&call.args), wrong.status) << wrong.line;
    EXPECT_STREQ(flashsdk_last_error(), wrong.line);
  }
}

TEST(CApi, AForwardDoesNotLookAtGradients) {
  Problem problem({});
  CCall call(problem.backward_args());
  copy_of(call, call.args.dout).ndim = 9;
  EXPECT_EQ(plan_of(&call.args), FLASHSDK_OK) << flashsdk_last_error();
  flashsdk_plan* plan = nullptr;
  EXPECT_EQ(flashsdk_plan_backward(&call.args, &plan), FLASHSDK_INVALID_ARGUMENT);
  EXPECT_STREQ(flashsdk_last_error(), "dout: 9 dimensions; at most 5");
}

TEST(CApi, NullPointers) {
  Problem problem({});
  const CCall call(problem.backward_args());
  flashsdk_plan* plan = nullptr;
  const auto expect = [](flashsdk_status status, const char* line) {
    EXPECT_EQ(status, FLASHSDK_INVALID_ARGUMENT);
    EXPECT_STREQ(flashsdk_last_error(), line);
  };
  expect(flashsdk_plan_forward(nullptr, &plan), "args: a null pointer; an address");
  expect(flashsdk_plan_backward(nullptr, &plan), "args: a null pointer; an address");
  EXPECT_EQ(plan, nullptr);
  expect(flashsdk_plan_forward(&call.args, nullptr), "plan: a null pointer; an address");
  expect(flashsdk_plan_launch(nullptr, nullptr, 0, nullptr), "plan: a null pointer; an address");
  expect(flashsdk_workspace_size_forward(&call.args, nullptr), "size: a null pointer; an address");
  expect(flashsdk_workspace_size_backward(&call.args, nullptr), "size: a null pointer; an address");
  expect(flashsdk_explain_forward(&call.args, nullptr, 1, nullptr), "buffer: a null pointer; an address");
  expect(flashsdk_block_lists_create(nullptr, 1, 1, 1, 1, 16, 16, nullptr), "lists: a null pointer; an address");
  flashsdk_block_lists* lists = nullptr;
  expect(flashsdk_block_lists_create(nullptr, 1, 1, 1, 1, 16, 16, &lists), "blocks: a null pointer; 1 bytes");
  expect(flashsdk_block_lists_mask(nullptr, nullptr), "lists: a null pointer; an address");
  expect(flashsdk_block_lists_mask(Blocks({1}, 1, 1, 16).lists.get(), nullptr), "mask: a null pointer; an address");
  EXPECT_EQ(flashsdk_plan_workspace_size(nullptr), 0u);
  flashsdk_plan_destroy(nullptr);
  flashsdk_block_lists_destroy(nullptr);

  CCall without_data(problem.backward_args());
  flashsdk_tensor& q = copy_of(without_data, without_data.args.q);
  q.data = nullptr;
  q.byte_offset = 0;
  expect(flashsdk_plan_forward(&without_data.args, &plan), "q: a null pointer; the address of shape (1, 64, 2, 64)");
}

TEST(CApi, AWorkspaceThatDoesNotDo) {
  Problem problem({});
  CCall call(problem.backward_args());
  flashsdk_plan* made = nullptr;
  ASSERT_EQ(flashsdk_plan_backward(&call.args, &made), FLASHSDK_OK);
  const PlanPtr plan(made);
  const std::size_t size = flashsdk_plan_workspace_size(made);
  ASSERT_GT(size, 0u);
  EXPECT_EQ(flashsdk_plan_launch(made, nullptr, 0, nullptr), FLASHSDK_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(flashsdk_last_error()),
            "workspace: 0 bytes; at least workspace_size(), " + std::to_string(size));
  EXPECT_EQ(flashsdk_plan_launch(made, nullptr, size, nullptr), FLASHSDK_INVALID_ARGUMENT);
  int stream = 0;
  EXPECT_EQ(flashsdk_plan_launch(made, nullptr, size, &stream), FLASHSDK_INVALID_ARGUMENT);
  EXPECT_STREQ(flashsdk_last_error(), "stream: given; none, as q is on cpu");
}

TEST(CApi, TheLastErrorIsOfThisThreadAndStays) {
  ASSERT_EQ(flashsdk_set_num_threads(0), FLASHSDK_INVALID_ARGUMENT);
  const std::string line = flashsdk_last_error();
  EXPECT_EQ(line, "n: 0; 1 to 4096");
  std::thread([] {
    EXPECT_STREQ(flashsdk_last_error(), "");
    flashsdk_set_num_threads(-5);
    EXPECT_STREQ(flashsdk_last_error(), "n: -5; 1 to 4096");
  }).join();
  EXPECT_EQ(flashsdk_last_error(), line);
  Problem problem({});
  const CCall call(problem.backward_args());
  EXPECT_EQ(plan_of(&call.args), FLASHSDK_OK);
  EXPECT_EQ(flashsdk_last_error(), line) << "a call that succeeds says nothing";
}

// An exception that is none of the library's: of a program's own pool.
TEST(CApi, NoExceptionPasses) {
  Problem problem({});
  const CCall call(problem.backward_args());
  flashsdk_plan* made = nullptr;
  ASSERT_EQ(flashsdk_plan_forward(&call.args, &made), FLASHSDK_OK);
  const PlanPtr plan(made);
  const auto launched_by = [&](decltype(Executor::run) run) {
    const Executor executor{2, nullptr, run};
    const ExecutorScope scope(executor);
    return launch(plan.get());
  };
  EXPECT_EQ(launched_by([](void*, int, void (*)(void*, int), void*) { throw std::runtime_error("the pool is full"); }),
            FLASHSDK_RUNTIME);
  EXPECT_STREQ(flashsdk_last_error(), "the pool is full");
  EXPECT_EQ(launched_by([](void*, int, void (*)(void*, int), void*) { throw std::bad_alloc(); }), FLASHSDK_RUNTIME);
  EXPECT_STREQ(flashsdk_last_error(), "no memory");
  EXPECT_EQ(launched_by([](void*, int, void (*)(void*, int), void*) { throw 1; }), FLASHSDK_RUNTIME);
  EXPECT_STREQ(flashsdk_last_error(), "an exception of no known type");
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
