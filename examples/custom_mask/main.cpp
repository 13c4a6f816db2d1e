// The CPU kernels, forward and backward, compiled with a mask policy of our own, and checked against brute force.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "dilated_window.h"

#define FLASHSDK_ISA_NS app  // the namespace of the kernels compiled here, with this project's flags
#include <flashsdk/kernels/common/own_kernel.h>
#include <flashsdk/kernels/cpu/backward.h>
#include <flashsdk/kernels/cpu/forward.h>

namespace {

constexpr int kHeadDim = 64;
template <class Policy>
constexpr auto kForward = flashsdk::cpu::app::forward_entry<float, kHeadDim, Policy, false>();
template <class Policy>
constexpr auto kBackward = flashsdk::cpu::app::backward_entry<float, kHeadDim, Policy, false>();

struct Problem {
  int seqlen, num_heads, num_heads_kv;
  DilatedWindow mask;
  std::vector<float> q, k, v, out, lse, dout, dq, dk, dv;

  Problem(int seqlen_, int num_heads_, int num_heads_kv_, DilatedWindow mask_)
      : seqlen(seqlen_), num_heads(num_heads_), num_heads_kv(num_heads_kv_), mask(mask_) {
    std::mt19937 rng(0);
    std::normal_distribution<float> normal;
    const std::size_t rows = static_cast<std::size_t>(seqlen) * kHeadDim;
    for (auto* t : {&q, &out, &dout, &dq}) t->resize(rows * num_heads);
    for (auto* t : {&k, &v, &dk, &dv}) t->resize(rows * num_heads_kv);
    lse.resize(static_cast<std::size_t>(seqlen) * num_heads);
    for (auto* t : {&q, &k, &v, &dout}) {
      for (float& x : *t) x = normal(rng);
    }
  }

  flashsdk::TensorView tensor(std::vector<float>& t, int heads) const {
    return {t.data(), flashsdk::DType::kFloat32, {1, seqlen, heads, kHeadDim}};
  }
  template <class Args>
  Args args() {
    Args args;
    args.q = tensor(q, num_heads);
    args.k = tensor(k, num_heads_kv);
    args.v = tensor(v, num_heads_kv);
    args.out = tensor(out, num_heads);
    args.lse = {lse.data(), flashsdk::DType::kFloat32, {1, num_heads, seqlen}};
    return args;
  }

  // Milliseconds of a launch.
  double run(const flashsdk::Plan& plan) {
    const std::size_t bytes = (plan.workspace_size() + 255) / 256 * 256;
    void* workspace = std::aligned_alloc(256, bytes);
    const auto start = std::chrono::steady_clock::now();
    plan.launch({{workspace, bytes}});
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    std::free(workspace);
    return time.count();
  }
  // Of both directions.
  template <class Policy>
  double run() {
    auto forward = args<flashsdk::ForwardArgs>();
    const double ms = run(flashsdk::plan_own(forward, kForward<Policy>, &mask));
    auto backward = args<flashsdk::BackwardArgs>();
    backward.dout = tensor(dout, num_heads);
    backward.dq = tensor(dq, num_heads);
    backward.dk = tensor(dk, num_heads_kv);
    backward.dv = tensor(dv, num_heads_kv);
    return ms + run(flashsdk::plan_own(backward, kBackward<Policy>, &mask));
  }
};

// The same in double precision, one element at a time, from the definition of the mask. Returns the largest error.
class BruteForce {
 public:
  explicit BruteForce(const Problem& problem) : p_(problem), dq_(p_.q.size()), dk_(p_.k.size()), dv_(p_.v.size()) {
    for (int h = 0; h < p_.num_heads; ++h) {
      for (int i = 0; i < p_.seqlen; ++i) query(h, i);
    }
    compare(p_.dq, dq_);
    compare(p_.dk, dk_);
    compare(p_.dv, dv_);
  }
  double error() const { return error_; }

 private:
  void query(int h, int i) {
    const int g = h / (p_.num_heads / p_.num_heads_kv);
    const double scale = 1 / std::sqrt(static_cast<double>(kHeadDim));
    auto row_q = [&](auto& t) { return t.data() + (static_cast<std::size_t>(i) * p_.num_heads + h) * kHeadDim; };
    auto row_k = [&](auto& t, int j) {
      return t.data() + (static_cast<std::size_t>(j) * p_.num_heads_kv + g) * kHeadDim;
    };
    std::vector<int> keys;
    for (int n = 0; n < p_.mask.window; ++n) {
      if (i - n * p_.mask.dilation >= 0) keys.push_back(i - n * p_.mask.dilation);
    }
    std::vector<double> probability, dp, out(kHeadDim);
    double sum = 0, delta = 0;
    for (int j : keys) probability.push_back(std::exp(scale * dot(row_q(p_.q), row_k(p_.k, j))));
    for (double x : probability) sum += x;
    for (std::size_t n = 0; n < keys.size(); ++n) {
      probability[n] /= sum;
      dp.push_back(dot(row_q(p_.dout), row_k(p_.v, keys[n])));
      delta += probability[n] * dp[n];
      for (int c = 0; c < kHeadDim; ++c) out[c] += probability[n] * row_k(p_.v, keys[n])[c];
    }
    for (std::size_t n = 0; n < keys.size(); ++n) {
      const double ds = probability[n] * (dp[n] - delta) * scale;
      for (int c = 0; c < kHeadDim; ++c) {
        row_q(dq_)[c] += ds * row_k(p_.k, keys[n])[c];
        row_k(dk_, keys[n])[c] += ds * row_q(p_.q)[c];
        row_k(dv_, keys[n])[c] += probability[n] * row_q(p_.dout)[c];
      }
    }
    for (int c = 0; c < kHeadDim; ++c) note(row_q(p_.out)[c], out[c]);
    note(p_.lse[static_cast<std::size_t>(h) * p_.seqlen + i], std::log(sum));
  }
  static double dot(const float* a, const float* b) {
    double sum = 0;
    for (int c = 0; c < kHeadDim; ++c) sum += static_cast<double>(a[c]) * b[c];
    return sum;
  }
  void compare(const std::vector<float>& ours, const std::vector<double>& expected) {
    for (std::size_t n = 0; n < ours.size(); ++n) note(ours[n], expected[n]);
  }
  void note(double ours, double expected) {
    const double error = std::fabs(ours - expected);
    if (std::isnan(error) || error > error_) error_ = error;  // NaN stays
  }

  const Problem& p_;
  std::vector<double> dq_, dk_, dv_;
  double error_ = 0;
};

}  // namespace

int main() {
  bool good = true;
  for (DilatedWindow mask : {DilatedWindow{1, 1}, DilatedWindow{5, 7}, DilatedWindow{64, 2}, DilatedWindow{40, 33}}) {
    Problem problem(777, 4, 2, mask);
    problem.run<DilatedWindowPolicy>();
    const double error = BruteForce(problem).error();
    const bool ok = error < 2e-5;
    std::printf("window %2d, dilation %2d: largest error of out, lse, dq, dk, dv %.1e  %s\n", mask.window,
                mask.dilation, error, ok ? "ok" : "WRONG");
    good &= ok;
  }

  Problem problem(4096, 2, 2, {64, 4});
  problem.run<flashsdk::DensePolicy>();  // warm up
  const double dense = problem.run<flashsdk::DensePolicy>();
  const double ours = problem.run<DilatedWindowPolicy>();
  std::printf(
      "seqlen 4096, window 64, dilation 4: %.0f ms; without a mask %.0f ms (tiles outside the window are skipped)\n",
      ours, dense);
  return good ? 0 : 1;
}
