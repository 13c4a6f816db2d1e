// CPU kernels with policies of one's own, compiled here, through plan_own().
#include <gtest/gtest.h>

#include <string>

#define FLASHSDK_ISA_NS own
#include "common/own_kernel.h"
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "own_policies.h"
#include "problem.h"

namespace flashsdk::testing {
namespace {

constexpr int kHeadDim = 64;
template <class T, class Policy, bool kFeatures>
constexpr auto kForward = cpu::own::forward_entry<T, kHeadDim, Policy, kFeatures>();
template <class T, class Policy, bool kFeatures>
constexpr auto kBackward = cpu::own::backward_entry<T, kHeadDim, Policy, kFeatures>();

void launch(const Plan& plan) {
  GuardedWorkspace workspace(plan.workspace_size());
  plan.launch(workspace.options());
  EXPECT_TRUE(workspace.guard_untouched()) << "wrote past its workspace";
}

template <class Policy, bool kFeatures, class T = float>
void check(const std::string& name, Problem problem, const OwnScores& definition, const void* user) {
  problem.own_scores = definition;
  problem.with_dlse = true;
  problem.check(
      name, [&] { launch(plan_own(problem.forward_args(), kForward<T, Policy, kFeatures>, user)); },
      [&] { launch(plan_own(problem.backward_args(), kBackward<T, Policy, kFeatures>, user)); });
}

const Shape kShapes[] = {{.batch = 2, .seqlen_q = 150, .seqlen_k = 150, .num_heads = 4, .num_heads_kv = 2},
                         {.seqlen_q = 3, .seqlen_k = 300, .num_heads = 2, .num_heads_kv = 1},
                         {.seqlen_q = 1, .seqlen_k = 70, .num_heads = 2, .num_heads_kv = 2},
                         {.num_heads = 2, .num_heads_kv = 1, .lengths_q = {5, 0, 90}, .lengths_k = {7, 3, 90}}};

TEST(OwnKernel, Mask) {
  for (const DilatedWindow mask : {DilatedWindow{1, 1}, DilatedWindow{5, 7}, DilatedWindow{40, 33}})
    for (const Shape& shape : kShapes) {
      check<DilatedWindowPolicy, false>("mask", Problem(shape), dilated_window(mask), &mask);
      Problem capped(shape);
      capped.options.softcap = 3;
      check<DilatedWindowPolicy, true>("mask and softcap", capped, dilated_window(mask), &mask);
    }
}

TEST(OwnKernel, ScoreThatIsASum) {
  for (const Shape& shape : kShapes) {
    const T5 t5(static_cast<int>(shape.num_heads));
    const T5Bias bias{t5.by_distance.data(), T5::kMaxDistance};
    check<T5Policy<DensePolicy>, true>("dense", Problem(shape), t5.definition(), &bias);
    Problem banded(shape);
    banded.options.mask = SlidingWindow(30, 4);
    check<T5Policy<BandPolicy>, true>("band", banded, t5.definition(), &bias);
    check<T5Policy<BandPolicy>, true>("no limits", Problem(shape), t5.definition(), &bias);
    check<T5Policy<DensePolicy>, true, cpu::Bf16>("bf16", Problem(shape, DType::kBFloat16), t5.definition(), &bias);
  }
}

// Keys of 8 bits: what the same values do in 16.
TEST(OwnKernel, KeysOf8Bits) {
  const DilatedWindow mask{5, 7};
  for (const Shape& shape : kShapes) {
    Problem problem(shape, DType::kBFloat16);
    const auto narrow = [](const HostTensor& t) {
      const TensorView from = t.view();
      HostTensor to(DType::kFloat8E4M3, {from.shape.begin(), from.shape.begin() + from.rank});
      for_each_index(from, [&](const Index& index) { store(to.view(), index, load(from, index)); });
      // Exact in 16 bits as well.
      for_each_index(from, [&](const Index& index) { store(from, index, load(to.view(), index)); });
      return to;
    };
    const HostTensor k = narrow(problem.k), v = narrow(problem.v);
    ForwardArgs args = problem.forward_args();
    const auto out_of = [&] {
      problem.out.fill(NAN);
      launch(plan_own(args, kForward<cpu::Bf16, DilatedWindowPolicy, false>, &mask));
      return problem.out.bytes();
    };
    const std::vector<unsigned char> expected = out_of();
    args.k = k.view();
    args.v = v.view();
    EXPECT_EQ(out_of(), expected);
  }
}

// Behind all other features.
TEST(OwnKernel, ScoreWithASlope) {
  for (const Shape& shape : kShapes) {
    Problem problem(shape);
    check<FactorPolicy<DensePolicy>, true>("alone", problem, FactorPolicy<DensePolicy>::definition(), nullptr);
    problem.options.softcap = 2;
    problem.options.dropout_p = 0.2;
    problem.options.seed = 7;
    problem.alibi = HostTensor(DType::kFloat32, {shape.num_heads});
    problem.alibi.fill(0.125);
    const std::int64_t rows = shape.packed() ? problem.options.max_seqlen_q : shape.seqlen_q,
                       keys = shape.packed() ? problem.options.max_seqlen_k : shape.seqlen_k;
    problem.bias = HostTensor(DType::kFloat32, {1, 1, rows, keys});
    problem.bias.fill_normal(problem.rng());
    store(problem.bias.view(), {0, 0, rows - 1, 0}, -INFINITY);  // stays hidden
    check<FactorPolicy<DensePolicy>, true>("with all", problem, FactorPolicy<DensePolicy>::definition(), nullptr);
  }
}

std::string message(const ForwardArgs& args, const ForwardEntry& entry) {
  try {
    plan_own(args, entry, nullptr);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

TEST(OwnKernel, RefusesWhatItDoesNotTake) {
  const ForwardEntry entry = kForward<float, FactorPolicy<BandPolicy>, true>;
  Problem problem({.seqlen_q = 8, .seqlen_k = 8});
  EXPECT_EQ(message(problem.forward_args(), entry), "");
  EXPECT_EQ(message(Problem({}, DType::kBFloat16).forward_args(), entry),
            "entry: the tensors are of another dtype; a kernel that takes the call");
  EXPECT_EQ(message(Problem({.head_dim = 80}).forward_args(), entry),
            "entry: head_dim is larger than the kernel's; a kernel that takes the call");
  EXPECT_EQ(message(Problem({.head_dim_v = 80}).forward_args(), entry),
            "entry: head_dim is larger than the kernel's; a kernel that takes the call");
  problem.options.mask = Causal();
  EXPECT_EQ(message(problem.forward_args(), kForward<float, FactorPolicy<DensePolicy>, true>),
            "entry: the mask is of another kind; a kernel that takes the call");
  problem.options.softcap = 1;
  EXPECT_EQ(message(problem.forward_args(), kForward<float, BandPolicy, false>),
            "entry: a feature is not compiled in; a kernel that takes the call");
  ForwardEntry gpu = entry;
  gpu.key.backend = Backend::kSm80;
  EXPECT_EQ(message(problem.forward_args(), gpu),
            "entry: the tensors are on another device; a kernel that takes the call");
  ForwardEntry choosy = entry;
  choosy.can_implement = [](const ForwardParams&) -> const char* { return "it is not what I want"; };
  EXPECT_EQ(message(problem.forward_args(), choosy), "entry: it is not what I want; a kernel that takes the call");
  ForwardArgs wrong = problem.forward_args();
  wrong.softcap = -1;
  EXPECT_NE(message(wrong, entry).find("softcap"), std::string::npos);
}

}  // namespace
}  // namespace flashsdk::testing
