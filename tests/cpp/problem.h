// A whole attention problem that owns its tensors, runs through the C++ API and is held against the reference.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "flashsdk/attention.h"
#include "host_tensor.h"
#include "reference.h"

namespace flashsdk::testing {

// Exactly as much workspace as asked for, 256-byte aligned, poisoned, with a guard behind it.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::size_t size) : size_(size), bytes_(size + 256 + kGuard, 0xFF) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    data_ = bytes_.data() + (256 - address % 256) % 256;
  }
  LaunchOptions options() const {
    LaunchOptions options;
    options.workspace = {data_, size_};
    return options;
  }
  bool guard_untouched() const {
    return std::all_of(data_ + size_, data_ + size_ + kGuard, [](unsigned char b) { return b == 0xFF; });
  }

 private:
  static constexpr std::size_t kGuard = 4096;
  std::size_t size_;
  std::vector<unsigned char> bytes_;
  unsigned char* data_;
};

struct Shape {
  std::int64_t batch = 1, seqlen_q = 64, seqlen_k = 64, num_heads = 2, num_heads_kv = 1, head_dim = 64, head_dim_v = 64;
  // Packed when lengths are given; batch and seqlen_q/k are not used then. Spare rows belong to no sequence.
  std::vector<int> lengths_q = {}, lengths_k = {};
  std::int64_t spare_rows = 0;
  bool packed() const { return !lengths_q.empty(); }
};

class Problem {
 public:
  HostTensor q, k, v, out, lse, dout, dlse, dq, dk, dv, bias, alibi, cu_q, cu_k;
  std::vector<std::uint64_t> seeds;  // for options.seed_tensor
  AttentionArgs options;             // everything beside the tensors

  explicit Problem(const Shape& shape, DType dtype = DType::kFloat32, Layout layout = Layout::kContiguous,
                   unsigned seed = 0)
      : shape_(shape), rng_(seed) {
    const std::int64_t total_q = sum(shape.lengths_q) + shape.spare_rows;
    const std::int64_t total_k = sum(shape.lengths_k) + shape.spare_rows;
    auto tensor = [&](std::int64_t rows, std::int64_t total, std::int64_t heads, std::int64_t d) {
      return shape.packed() ? HostTensor(dtype, {total, heads, d}, layout)
                            : HostTensor(dtype, {shape.batch, rows, heads, d}, layout);
    };
    for (HostTensor* t : {&q, &dq}) *t = tensor(shape.seqlen_q, total_q, shape.num_heads, shape.head_dim);
    for (HostTensor* t : {&k, &dk}) *t = tensor(shape.seqlen_k, total_k, shape.num_heads_kv, shape.head_dim);
    for (HostTensor* t : {&v, &dv}) *t = tensor(shape.seqlen_k, total_k, shape.num_heads_kv, shape.head_dim_v);
    for (HostTensor* t : {&out, &dout}) *t = tensor(shape.seqlen_q, total_q, shape.num_heads, shape.head_dim_v);
    for (HostTensor* t : {&lse, &dlse}) {
      *t = shape.packed() ? HostTensor(DType::kFloat32, {shape.num_heads, total_q})
                          : HostTensor(DType::kFloat32, {shape.batch, shape.num_heads, shape.seqlen_q});
    }
    for (HostTensor* t : {&q, &k, &v, &dout, &dlse}) t->fill_normal(rng_);
    if (shape.packed()) {
      cu_q = cumulative(shape.lengths_q);
      cu_k = cumulative(shape.lengths_k);
      options.max_seqlen_q = *std::max_element(shape.lengths_q.begin(), shape.lengths_q.end());
      options.max_seqlen_k = *std::max_element(shape.lengths_k.begin(), shape.lengths_k.end());
    }
  }

  std::mt19937& rng() { return rng_; }
  const Shape& shape() const { return shape_; }

  ForwardArgs forward_args() const {
    ForwardArgs args;
    static_cast<AttentionArgs&>(args) = common();
    args.out = out.view();
    args.lse = lse.view();
    return args;
  }
  BackwardArgs backward_args() const {
    BackwardArgs args;
    static_cast<AttentionArgs&>(args) = common();
    args.dout = dout.view();
    args.out = out.view();
    args.lse = lse.view();
    args.dlse = with_dlse ? dlse.view() : TensorView();
    args.dq = dq.view();
    args.dk = dk.view();
    args.dv = dv.view();
    return args;
  }
  bool with_dlse = false;

  OwnScores own_scores;  // what kernels of one's own do beside

  void forward() {
    poison({&out, &lse});
    const ForwardArgs args = forward_args();
    GuardedWorkspace workspace(workspace_size(args));
    shape_.packed() ? mha_varlen_fwd(args, workspace.options()) : mha_fwd(args, workspace.options());
    EXPECT_TRUE(workspace.guard_untouched()) << "forward: wrote past its workspace";
  }
  void backward() {
    poison({&dq, &dk, &dv});
    const BackwardArgs args = backward_args();
    GuardedWorkspace workspace(workspace_size(args));
    shape_.packed() ? mha_varlen_bwd(args, workspace.options()) : mha_bwd(args, workspace.options());
    EXPECT_TRUE(workspace.guard_untouched()) << "backward: wrote past its workspace";
  }

  // Runs both and compares every element. Bounds are those of one rounding of inputs of order 1, with room.
  void check(const std::string& name) {
    check(name, [this] { forward(); }, [this] { backward(); });
  }
  // … by other calls, which write the same tensors.
  template <class Forward, class Backward>
  void check(const std::string& name, Forward run_forward, Backward run_backward) {
    const std::vector<HostTensor> inputs{q, k, v, dout, dlse, bias, alibi, cu_q, cu_k};
    poison({&out, &lse, &dq, &dk, &dv});
    run_forward();
    const HostTensor out_before = out, lse_before = lse;
    run_backward();
    const Reference expected(common(), dout.view(), with_dlse ? dlse.view() : TensorView(), own_scores);
    compare(name + " out", out, expected.out);
    compare_lse(name + " lse", expected.lse);
    compare(name + " dq", dq, expected.dq);
    compare(name + " dk", dk, expected.dk);
    compare(name + " dv", dv, expected.dv);

    const HostTensor* after[] = {&q, &k, &v, &dout, &dlse, &bias, &alibi, &cu_q, &cu_k};
    for (std::size_t n = 0; n < inputs.size(); ++n) {
      EXPECT_EQ(inputs[n].bytes(), after[n]->bytes()) << name << ": input " << n << " was written to";
    }
    EXPECT_EQ(out_before.bytes(), out.bytes()) << name << ": the backward wrote to out";
    EXPECT_EQ(lse_before.bytes(), lse.bytes()) << name << ": the backward wrote to lse";
    for (const HostTensor* t : {&out, &lse, &dq, &dk, &dv}) {
      EXPECT_TRUE(t->gaps_untouched()) << name << ": wrote between the elements of an output";
    }
  }

  AttentionArgs common() const {
    AttentionArgs args = options;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
    args.bias = bias.view();
    args.alibi_slopes = alibi.view();
    args.cu_seqlens_q = cu_q.view();
    args.cu_seqlens_k = cu_k.view();
    return args;
  }

 private:
  static std::int64_t sum(const std::vector<int>& lengths) {
    std::int64_t total = 0;
    for (int length : lengths) total += length;
    return total;
  }
  static HostTensor cumulative(const std::vector<int>& lengths) {
    HostTensor t(DType::kInt32, {static_cast<std::int64_t>(lengths.size()) + 1});
    std::int64_t total = 0, n = 0;
    store(t.view(), Index{n}, 0);
    for (int length : lengths) store(t.view(), Index{++n}, static_cast<double>(total += length));
    return t;
  }
  static void poison(std::initializer_list<HostTensor*> tensors) {
    for (HostTensor* t : tensors) t->fill(NAN);
  }

  void compare(const std::string& name, const HostTensor& ours, const std::vector<double>& expected) const {
    const DType dtype = ours.view().dtype;
    const double relative = dtype == DType::kFloat32 ? 1e-5 : (dtype == DType::kFloat16 ? 3e-3 : 2e-2);
    double largest = 1, worst = 0;
    for (double x : expected) largest = std::max(largest, std::fabs(x));
    const std::vector<double> values = dense(ours.view());
    ASSERT_EQ(values.size(), expected.size()) << name;
    for (std::size_t n = 0; n < values.size(); ++n) {
      const double error = std::fabs(values[n] - expected[n]);
      if (std::isnan(error) || error > worst) worst = error;  // NaN stays
    }
    EXPECT_LE(worst, relative * largest) << name << ": error " << worst << ", largest value " << largest;
  }
  void compare_lse(const std::string& name, const std::vector<double>& expected) const {
    const std::vector<double> values = dense(lse.view());
    // bf16 kernels may take an exponential that is exact to the digits of a rounded probability.
    const double relative = q.view().dtype == DType::kBFloat16 ? 1e-4 : 1e-5;
    for (std::size_t n = 0; n < values.size(); ++n) {
      if (std::isinf(expected[n])) {
        ASSERT_EQ(values[n], expected[n]) << name << " element " << n;
      } else {
        ASSERT_NEAR(values[n], expected[n], relative * (1 + std::fabs(expected[n]))) << name << " element " << n;
      }
    }
  }

  Shape shape_;
  std::mt19937 rng_;
};

}  // namespace flashsdk::testing
