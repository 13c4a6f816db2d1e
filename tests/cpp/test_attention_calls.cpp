// How calls run, beside what they compute: threads, plans, pages, several callers. Once for each instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#include "attention_fixture.h"
#include "flashsdk/flashsdk.h"
#include "planned_call.h"
#include "problem.h"

namespace flashsdk::testing {
namespace {

TEST_F(Attention, ThreadsAndRunsDoNotChangeABit) {
  const int threads = get_num_threads();
  // The second's sums over keys are cut into parts, the third's over queries.
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{300, 400}, std::pair{40, 8200}, std::pair{8200, 200}}) {
    Problem first({.batch = 2, .seqlen_q = seqlen_q, .seqlen_k = seqlen_k, .num_heads = 4, .num_heads_kv = 2},
                  DType::kBFloat16);
    first.options.mask = Causal();
    first.options.deterministic = true;
    first.forward();
    first.backward();
    for (int n : {1, 2, 3, 7}) {
      set_num_threads(n);
      Problem again = first;
      again.forward();
      again.backward();
      EXPECT_EQ(again.out.bytes(), first.out.bytes()) << n << " threads, " << seqlen_q << " queries";
      EXPECT_EQ(again.lse.bytes(), first.lse.bytes()) << n << " threads, " << seqlen_q << " queries";
      EXPECT_EQ(again.dq.bytes(), first.dq.bytes()) << n << " threads, " << seqlen_q << " queries";
      EXPECT_EQ(again.dk.bytes(), first.dk.bytes()) << n << " threads, " << seqlen_q << " queries";
      EXPECT_EQ(again.dv.bytes(), first.dv.bytes()) << n << " threads, " << seqlen_q << " queries";
    }
  }
  set_num_threads(threads);
}

// Whether both of two threads have computed: each has a scratch of its own, at the end of the workspace.
template <class Params>
bool both_threads_worked(const PlannedCall<Params>& call) {
  const std::size_t size = call.entry->workspace_size(call.params, 2);
  const std::size_t scratch = size - call.entry->workspace_size(call.params, 1);
  GuardedWorkspace workspace(size);
  // Both begin at once: starting a thread takes longer than a job.
  ParallelRunner runner{2, nullptr, [](void*, int, void (*fn)(void*, int), void* context) {
                          std::atomic<int> ready{0};
                          const auto begin = [&](int slot) {
                            for (++ready; ready < 2;) std::this_thread::yield();
                            fn(context, slot);
                          };
                          std::thread other(begin, 1);
                          begin(0);
                          other.join();
                        }};
  const auto* bytes = static_cast<const unsigned char*>(workspace.options().workspace.data);
  call.entry->launch(call.params, {workspace.options().workspace.data, nullptr, runner});
  EXPECT_TRUE(workspace.guard_untouched());
  auto touched = [&](const unsigned char* from) {
    return std::any_of(from, from + scratch, [](unsigned char b) { return b != 0xFF; });
  };
  return touched(bytes + size - 2 * scratch) && touched(bytes + size - scratch);
}

// Who comes first takes a job. Of several both threads get one sooner or later, also beside other programs.
template <class Params>
bool is_work_for_two(const PlannedCall<Params>& call) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::seconds(20);
  while (Clock::now() < end)
    if (both_threads_worked(call)) return true;
  return false;
}

// The keys of a sequence, wherever they lie: appended to pages in any order, and in one piece.
TEST_F(Attention, PagesHaveTheBitsOfOnePiece) {
  constexpr std::int64_t kPage = 5, kPages = 20, kMost = 9;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const std::int64_t seqlen_q : {1, 3, 40}) {
      Problem p({.batch = 2,
                 .seqlen_q = seqlen_q,
                 .seqlen_k = kPage * kMost,
                 .num_heads = 4,
                 .num_heads_kv = 2,
                 .head_dim = 24,
                 .head_dim_v = 40},
                dtype);
      std::int32_t used[] = {43, 17}, none[] = {0, 0}, table[2 * kMost];
      for (int n = 0; n < 2 * kMost; ++n) table[n] = static_cast<std::int32_t>(7 * n % kPages);
      p.options.seqused_k = TensorView(used, DType::kInt32, {2});
      p.forward();
      const HostTensor out = p.out, lse = p.lse;

      HostTensor k(dtype, {kPages, kPage, 2, 24}), v(dtype, {kPages, kPage, 2, 40});
      k.fill(NAN);
      v.fill(NAN);
      KvAppendArgs append;
      append.k_cache = k.view();
      append.v_cache = v.view();
      append.k = p.k.view();
      append.v = p.v.view();
      append.seqused_k = TensorView(none, DType::kInt32, {2});
      append.block_table = TensorView(table, DType::kInt32, {2, kMost});
      kv_append(append);
      p.k = k;
      p.v = v;
      p.options.block_table = append.block_table;
      p.forward();
      EXPECT_EQ(p.out.bytes(), out.bytes());
      EXPECT_EQ(p.lse.bytes(), lse.bytes());
    }
  }
}

TEST_F(Attention, APlanReadsUsedLengthsAtEachLaunch) {
  Problem p({.batch = 2, .seqlen_q = 9, .seqlen_k = 40, .num_heads = 2, .num_heads_kv = 1, .head_dim = 16});
  std::int32_t used[] = {40, 3};
  p.options.seqused_k = TensorView(used, DType::kInt32, {2});
  const ForwardArgs args = p.forward_args();
  const Plan planned = plan(args);
  used[0] = 7;
  used[1] = 12;
  GuardedWorkspace workspace(planned.workspace_size());
  p.out.fill(NAN);
  planned.launch(workspace.options());
  const HostTensor by_plan = p.out;
  p.forward();
  EXPECT_EQ(by_plan.bytes(), p.out.bytes());
  used[1] = 41;
  EXPECT_THROW(planned.launch(workspace.options()), Error);
  EXPECT_EQ(by_plan.bytes(), p.out.bytes());  // what is refused writes nothing
}

TEST_F(Attention, APlanIsTheCallCheckedOnce) {
  Problem batched({.seqlen_q = 100, .seqlen_k = 70}), packed({.lengths_q = {3, 60}, .lengths_k = {50, 7}});
  for (Problem* p : {&batched, &packed}) {
    p->options.mask = Causal();
    p->forward();
    p->backward();
    const auto out = p->out.bytes(), dq = p->dq.bytes(), dv = p->dv.bytes();
    const ForwardArgs forward = p->forward_args();
    const BackwardArgs backward = p->backward_args();
    const Plan plans[] = {plan(forward), plan(backward)};
    EXPECT_EQ(plans[0].workspace_size(), workspace_size(forward));
    EXPECT_EQ(plans[1].workspace_size(), workspace_size(backward));
    for (int launches = 0; launches < 2; ++launches) {
      for (HostTensor* t : {&p->out, &p->dq, &p->dv}) t->fill(99);
      for (const Plan& each : plans) {
        const Plan copy = each;
        const GuardedWorkspace workspace(copy.workspace_size());
        copy.launch(workspace.options());
        EXPECT_TRUE(workspace.guard_untouched());
      }
      EXPECT_EQ(p->out.bytes(), out);
      EXPECT_EQ(p->dq.bytes(), dq);
      EXPECT_EQ(p->dv.bytes(), dv);
    }
    p->out.fill(99);
    const auto before = p->out.bytes();
    EXPECT_THROW(plans[0].launch(), Error) << "a launch without a workspace";
    EXPECT_EQ(p->out.bytes(), before);
  }

  // On a CPU lengths may change between launches, and are checked again.
  const Plan of_packed = plan(packed.forward_args());
  std::vector<std::int32_t> lengths{0, 60, 63};
  ForwardArgs other = packed.forward_args();
  const TensorView starts(lengths.data(), DType::kInt32, {3});
  other.cu_seqlens_q = starts;
  const Plan of_lengths = plan(other);
  const GuardedWorkspace workspace(of_lengths.workspace_size());
  of_lengths.launch(workspace.options());
  const auto first = packed.out.bytes();
  lengths = {0, 3, 63};  // as the problem's own
  of_lengths.launch(workspace.options());
  EXPECT_NE(packed.out.bytes(), first);
  const auto changed = packed.out.bytes();
  of_packed.launch(workspace.options());
  EXPECT_EQ(packed.out.bytes(), changed);
  lengths = {0, 3, 64};  // more rows than q has
  EXPECT_THROW(of_lengths.launch(workspace.options()), Error);
  EXPECT_EQ(packed.out.bytes(), changed);

  ForwardArgs bad = batched.forward_args();
  bad.dropout_p = 2;
  EXPECT_THROW(plan(bad), Error);
}

TEST_F(Attention, LongSumsAreWorkForEveryThread) {
  Problem group({.seqlen_q = 1, .seqlen_k = 8192, .num_heads = 32}),
      queries({.seqlen_q = 40, .seqlen_k = 8192, .num_heads = 1});
  Problem few_keys({.seqlen_q = 8192, .seqlen_k = 77, .num_heads = 1});
  Problem few_keys_of_a_group({.seqlen_q = 300, .seqlen_k = 77, .num_heads = 32});
  queries.options.mask = Causal();
  for (Problem* p : {&group, &queries}) EXPECT_TRUE(is_work_for_two(plan_call(p->forward_args(), false)));
  for (Problem* p : {&few_keys, &few_keys_of_a_group}) {
    p->forward();
    EXPECT_TRUE(is_work_for_two(plan_call(p->backward_args(), false)));
  }
}

TEST_F(Attention, SeveralCallersAtOnce) {
  constexpr int kCallers = 4;
  const Problem problem = [] {
    Problem p({.batch = 1, .seqlen_q = 200, .seqlen_k = 200, .num_heads = 3, .num_heads_kv = 3});
    p.options.mask = Causal();
    p.forward();
    p.backward();
    return p;
  }();
  std::vector<Problem> problems(kCallers, problem);
  std::vector<std::thread> callers;
  for (Problem& p : problems) {
    callers.emplace_back([&p] {
      for (int round = 0; round < 5; ++round) {
        p.forward();
        p.backward();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const Problem& p : problems) {
    EXPECT_EQ(p.out.bytes(), problem.out.bytes());
    EXPECT_EQ(p.dq.bytes(), problem.dq.bytes());
    EXPECT_EQ(p.dk.bytes(), problem.dk.bytes());
    EXPECT_EQ(p.dv.bytes(), problem.dv.bytes());
  }
}

}  // namespace
}  // namespace flashsdk::testing
