// GPU kernels with policies of one's own, through plan_own(), against the definition. They skip without a GPU.
#include "gpu/own_kernels.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "common/own_kernel.h"
#include "gpu/device_memory.h"
#include "own_policies.h"
#include "problem.h"

namespace flashsdk::testing {
namespace {

// A copy of host memory on GPU 0.
class Copy : public DeviceMemory {
 public:
  Copy(const void* host, std::size_t bytes) : DeviceMemory(bytes + 1, 0) {
    cuda::check(cudaMemcpy(data(), host, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
};

// Copies of contiguous host tensors; what is written goes back when all is done.
class Copies {
 public:
  TensorView of(TensorView host, bool written = false) {
    if (!host.given()) return host;
    const std::size_t bytes = static_cast<std::size_t>(host.numel() * size_of(host.dtype));
    copies_.push_back(std::make_unique<Copy>(host.data, bytes));
    if (written) back_.push_back({host.data, copies_.back()->data(), bytes});
    host.data = copies_.back()->data();
    host.device = {DeviceType::kCUDA, 0};
    return host;
  }
  template <class Args>
  Args with_inputs(Args args) {
    for (TensorView* t : {&args.q, &args.k, &args.v, &args.cu_seqlens_q, &args.cu_seqlens_k}) *t = of(*t);
    return args;
  }
  void launch(const Plan& plan) {
    const DeviceMemory workspace(plan.workspace_size() + 1, 0);
    plan.launch({{workspace.data(), plan.workspace_size()}});
    cuda::synchronize(nullptr, 0);
    for (const Back& b : back_)
      cuda::check(cudaMemcpy(b.host, b.device, b.bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  struct Back {
    void* host;
    const void* device;
    std::size_t bytes;
  };
  std::vector<std::unique_ptr<Copy>> copies_;
  std::vector<Back> back_;
};

void check(const std::string& name, const OwnKernel& kernel, Problem problem, const OwnScores& definition,
           const void* user) {
  problem.own_scores = definition;
  problem.with_dlse = true;
  const auto forward = [&] {
    Copies copies;
    const ForwardArgs host = problem.forward_args();
    ForwardArgs args = copies.with_inputs(host);
    args.out = copies.of(host.out, true);
    args.lse = copies.of(host.lse, true);
    copies.launch(plan_own(args, kernel.forward, user));
  };
  const auto backward = [&] {
    Copies copies;
    const BackwardArgs host = problem.backward_args();
    BackwardArgs args = copies.with_inputs(host);
    for (TensorView* t : {&args.dout, &args.out, &args.lse, &args.dlse}) *t = copies.of(*t);
    for (TensorView* t : {&args.dq, &args.dk, &args.dv}) *t = copies.of(*t, true);
    copies.launch(plan_own(args, kernel.backward, user));
  };
  problem.check(name, forward, backward);
}

const Shape kShapes[] = {{.batch = 2, .seqlen_q = 300, .seqlen_k = 300, .num_heads = 4, .num_heads_kv = 2},
                         {.seqlen_q = 40, .seqlen_k = 520, .num_heads = 2, .num_heads_kv = 1},
                         {.num_heads = 2, .num_heads_kv = 1, .lengths_q = {5, 0, 290}, .lengths_k = {7, 3, 290}}};

void check_all(const OwnKernels& kernels) {
  for (const Shape& shape : kShapes) {
    const Problem problem(shape, DType::kBFloat16);
    Problem causal = problem;
    causal.options.mask = Causal();
    for (const DilatedWindow mask : {DilatedWindow{1, 1}, DilatedWindow{5, 7}, DilatedWindow{64, 2}}) {
      const Copy user(&mask, sizeof mask);
      check("dilated window", kernels.dilated_window, problem, dilated_window(mask), user.data());
    }
    const T5 t5(static_cast<int>(shape.num_heads));
    const Copy table(t5.by_distance.data(), t5.by_distance.size() * sizeof(float));
    const T5Bias bias{static_cast<const float*>(table.data()), T5::kMaxDistance};
    const Copy user(&bias, sizeof bias);
    check("T5", kernels.t5, problem, t5.definition(), user.data());
    check("T5, causal", kernels.t5, causal, t5.definition(), user.data());
    check("factor", kernels.factor, problem, FactorPolicy<BandPolicy>::definition(), nullptr);
    causal.options.softcap = 2;
    check("factor, causal, softcap", kernels.factor, causal, FactorPolicy<BandPolicy>::definition(), nullptr);
  }
}

void skip_or_check(const char* arch, OwnKernels (*kernels)()) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "needs a GPU";
  if (!cuda::machine_refusal(arch).empty()) GTEST_SKIP() << "not for this GPU";
  check_all(kernels());
}

#ifdef FLASHSDK_TEST_own_sm80
TEST(Device, OwnKernelsOfSm80) { skip_or_check("sm_80", own_sm80); }
#endif
#ifdef FLASHSDK_TEST_own_sm90
TEST(Device, OwnKernelsOfSm90) { skip_or_check("sm_90a", own_sm90); }
#endif

}  // namespace
}  // namespace flashsdk::testing
