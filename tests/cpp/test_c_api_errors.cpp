// The C API: structs of other versions are understood, failures are a status and a line.
#include "flashsdk/c_api.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "c_call.h"
#include "flashsdk/flashsdk.h"
#include "problem.h"

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
FLASHSDK_EXPECT_AT(256, k_descale);
FLASHSDK_EXPECT_AT(264, v_descale);
static_assert(sizeof(void*) != 8 || (sizeof(flashsdk_band) == 32 && sizeof(flashsdk_block_mask) == 96));

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
      {"v: dtype int8; float32, float16, bfloat16, float8_e4m3fn, int32, int64, uint64 or bool",
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

}  // namespace
}  // namespace flashsdk::testing
