// The device contract through the C++ API: graphs, streams, the current device, the caller's workspace. Tests that
// need a GPU skip without one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "cuda/host/device.h"
#include "flashsdk/flashsdk.h"
#include "gpu/device_memory.h"

namespace flashsdk {
namespace {

using testing::DeviceMemory;

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

#define NEEDS_GPUS(n)                                                     \
  if (device_count() < (n)) GTEST_SKIP() << "needs " << (n) << " GPU(s)"; \
  if (!cuda::machine_refusal("sm_80").empty()) GTEST_SKIP() << "not for this GPU"

// Batch 1, head_dim 64; bfloat16. All inputs are 1, so that every output of the forward is. There are more heads than a
// GPU has multiprocessors, so that kernels whose blocks draw more work do.
class Problem {
 public:
  static constexpr int kSeqlen = 96, kHeads = 256, kHeadDim = 64, kElements = kSeqlen * kHeads * kHeadDim;

  explicit Problem(int device = 0)
      : device_(device), memory_(9 * kElements * sizeof(std::uint16_t) + kHeads * kSeqlen * sizeof(float), device) {
    fill(0x3F80);
  }

  // bfloat16 bits of every element of q, k, v and dout.
  void fill(std::uint16_t bits) {
    cuda::DeviceGuard guard(device_);
    const std::vector<std::uint16_t> ones(4 * kElements, bits);
    cuda::check(cudaMemcpy(memory_.data(), ones.data(), 2 * ones.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }

  ForwardArgs forward() const { return with_common<ForwardArgs>(); }
  BackwardArgs backward() const {
    auto args = with_common<BackwardArgs>();
    args.dout = tensor(3);
    args.dq = tensor(5);
    args.dk = tensor(6);
    args.dv = tensor(7);
    return args;
  }

  std::vector<std::uint16_t> read(int index) const {
    cuda::DeviceGuard guard(device_);
    std::vector<std::uint16_t> host(kElements);
    cuda::check(cudaMemcpy(host.data(), tensor(index).data, 2 * host.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  }
  void expect_out(std::uint16_t bits) const {
    for (std::uint16_t x : read(4)) ASSERT_EQ(x, bits);
  }

  TensorView tensor(int index) const {
    return TensorView(static_cast<std::uint16_t*>(memory_.data()) + index * kElements, DType::kBFloat16,
                      {1, kSeqlen, kHeads, kHeadDim}, {DeviceType::kCUDA, device_});
  }

 private:
  // What both directions take.
  template <class Args>
  Args with_common() const {
    Args args;
    args.q = tensor(0);
    args.k = tensor(1);
    args.v = tensor(2);
    args.out = tensor(4);
    args.lse = TensorView(static_cast<std::uint16_t*>(memory_.data()) + 9 * kElements, DType::kFloat32,
                          {1, kHeads, kSeqlen}, {DeviceType::kCUDA, device_});
    args.mask = Causal();
    return args;
  }
  int device_;
  DeviceMemory memory_;
};

// A forward with the workspace it asks for.
void run_forward(const ForwardArgs& args, void* stream = nullptr) {
  const std::size_t bytes = workspace_size(args);
  DeviceMemory workspace(bytes + 1, args.q.device.index);
  mha_fwd(args, {{workspace.data(), bytes}, stream});
  cuda::synchronize(stream, args.q.device.index);
}

template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    return std::string(to_string(e.code())) + ": " + e.what();
  }
  return "no error";
}

// First in this file: it captures the first launches of the process, where a kernel is loaded and prepared.
// In a global capture every call that might allocate or synchronise is an error.
TEST(Device, AFirstCallCanBeCaptured) {
  NEEDS_GPUS(1);
  Problem problem;
  const ForwardArgs forward = problem.forward();
  const BackwardArgs backward = problem.backward();
  const std::size_t forward_bytes = workspace_size(forward), bytes = workspace_size(backward);
  DeviceMemory forward_workspace(forward_bytes + 1, 0), workspace(bytes, 0);
  cudaStream_t stream;
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin");
  mha_fwd(forward, {{forward_workspace.data(), forward_bytes}, stream});
  mha_bwd(backward, {{workspace.data(), bytes}, stream});
  cudaGraph_t graph;
  cuda::check(cudaStreamEndCapture(stream, &graph), "end");
  cudaGraphExec_t exec;
  cuda::check(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  for (std::uint16_t bits : {0x3F80, 0x4000, 0x4040}) {  // 1, 2, 3
    problem.fill(bits);
    cuda::check(cudaGraphLaunch(exec, stream), "launch");
    cuda::check(cudaStreamSynchronize(stream), "synchronise");
    problem.expect_out(bits);
  }
  const auto replayed = problem.read(7);
  mha_bwd(backward, {{workspace.data(), bytes}, stream});
  cuda::check(cudaStreamSynchronize(stream), "synchronise");
  EXPECT_EQ(problem.read(7), replayed);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(Device, TheCallersWorkspaceIsChecked) {
  NEEDS_GPUS(1);
  Problem problem;
  const BackwardArgs args = problem.backward();
  const std::size_t bytes = workspace_size(args);
  ASSERT_GT(bytes, 0u);
  const std::string needed = std::to_string(bytes);
  DeviceMemory workspace(bytes + 256, 0);
  EXPECT_EQ(message_of([&] { mha_bwd(args); }),
            "invalid_argument: workspace: 0 bytes; at least workspace_size(), " + needed);
  EXPECT_EQ(
      message_of([&] { mha_bwd(args, {{workspace.data(), bytes - 1}}); }),
      "invalid_argument: workspace: " + std::to_string(bytes - 1) + " bytes; at least workspace_size(), " + needed);
  EXPECT_EQ(message_of([&] { mha_bwd(args, {{nullptr, bytes}}); }),
            "invalid_argument: workspace: a null pointer; " + needed + " bytes");
  EXPECT_EQ(message_of([&] { mha_bwd(args, {{static_cast<char*>(workspace.data()) + 4, bytes}}); }),
            "invalid_argument: workspace: its address is not a multiple of 256; 256-byte aligned");
  for (std::uint16_t x : problem.read(5)) ASSERT_EQ(x, 0xFFFF);  // untouched
}

TEST(Device, ErrorsOfOtherLibrariesAreNotOurs) {
  NEEDS_GPUS(1);
  Problem problem;
  EXPECT_NE(cudaSetDevice(1000), cudaSuccess);  // leaves its code for cudaGetLastError
  EXPECT_EQ(message_of([&] { run_forward(problem.forward()); }), "no error");
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  problem.expect_out(0x3F80);
}

TEST(Device, ADeviceThatIsNotThere) {
  NEEDS_GPUS(1);
  ForwardArgs args = Problem().forward();
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device.index = 63;
  EXPECT_NE(message_of([&] { mha_fwd(args); }).find("runtime: asking for a device attribute"), std::string::npos);
  for (TensorView* t : {&args.q, &args.k, &args.v, &args.out, &args.lse}) t->device.index = 64;
  EXPECT_EQ(message_of([&] { mha_fwd(args); }), "invalid_argument: device: cuda:64; cuda:0 to cuda:63 are supported");
}

// The runtime gives a thread its context with the first call that needs one; the driver, which makes TMA descriptors,
// does not. Kernels are prepared before, as what prepares them is such a call.
TEST(Device, AThreadThatHasNotCalledCudaYet) {
  NEEDS_GPUS(1);
  Problem problem;
  const ForwardArgs forward = problem.forward();
  const BackwardArgs backward = problem.backward();
  const std::size_t bytes = std::max(workspace_size(forward), workspace_size(backward));
  DeviceMemory workspace(bytes + 1, 0);
  auto both = [&] {
    mha_fwd(forward, {{workspace.data(), bytes}});
    mha_bwd(backward, {{workspace.data(), bytes}});
  };
  both();
  cuda::synchronize(nullptr, 0);
  problem.fill(0x4000);
  std::string message;
  std::thread([&] { message = message_of(both); }).join();
  EXPECT_EQ(message, "no error");
  cuda::synchronize(nullptr, 0);
  problem.expect_out(0x4000);
}

TEST(Device, SeveralGpus) {
  NEEDS_GPUS(2);
  cudaSetDevice(0);
  Problem problem(1);
  const ForwardArgs args = problem.forward();
  run_forward(args);
  int current = -1;
  cudaGetDevice(&current);
  EXPECT_EQ(current, 0);
  problem.expect_out(0x3F80);

  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "stream");  // of device 0
  EXPECT_EQ(message_of([&] { run_forward(args, stream); }),
            "invalid_argument: stream: on cuda:0; one on cuda:1, where q is");
  cudaStreamDestroy(stream);

  ForwardArgs mixed = args;
  mixed.k.device.index = 0;
  EXPECT_EQ(message_of([&] { mha_fwd(mixed); }), "invalid_argument: k: on cuda:0; cuda:1, where q is");
}

TEST(Device, WhatRunsWhere) {
  EXPECT_TRUE(cuda::runs_on("80-real", 80));
  EXPECT_TRUE(cuda::runs_on("80-real", 86));
  EXPECT_FALSE(cuda::runs_on("80-real", 90));
  EXPECT_FALSE(cuda::runs_on("86-real", 80));
  EXPECT_TRUE(cuda::runs_on("80", 90));
  EXPECT_TRUE(cuda::runs_on("80-virtual", 120));
  EXPECT_FALSE(cuda::runs_on("80-virtual", 75));
  EXPECT_TRUE(cuda::runs_on("90a-real", 90));
  EXPECT_FALSE(cuda::runs_on("90a", 100));
  EXPECT_TRUE(cuda::any_runs_on("80-real 90a-real", 90));
  EXPECT_FALSE(cuda::any_runs_on("80-real 90a-real", 100));
  EXPECT_FALSE(cuda::any_runs_on("", 80));
}

TEST(Device, ARefusedCardIsNamed) {
  EXPECT_EQ(cuda::describe_refusal(0, "Tesla T4", 75, "80-real 90a-real"),
            "q: on cuda:0, Tesla T4 of compute capability 7.5; a GPU that this build has code for "
            "(CMAKE_CUDA_ARCHITECTURES: 80-real 90a-real)");
}

// On a machine without a GPU or a driver a build with CUDA says so, and computes on the CPU.
TEST(Device, NoGpuAtAll) {
  if (device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EQ(cuda::machine_refusal("sm_80"), "no GPU");
  for (const KernelInfo& kernel : kernels()) EXPECT_EQ(kernel.available, kernel.backend == "cpu") << kernel.name;
  std::vector<float> x(16 * 8, 1.f), lse(16);
  ForwardArgs args;
  args.q = args.k = args.v = args.out = TensorView(x.data(), DType::kBFloat16, {1, 16, 1, 8}, {DeviceType::kCUDA, 0});
  args.out.data = x.data() + 64;
  args.lse = TensorView(lse.data(), DType::kFloat32, {1, 1, 16}, {DeviceType::kCUDA, 0});
  EXPECT_EQ(message_of([&] { mha_fwd(args); }).rfind("runtime: asking for a device attribute: ", 0), 0u);
}

}  // namespace
}  // namespace flashsdk
