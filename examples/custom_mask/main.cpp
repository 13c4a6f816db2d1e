// The CPU kernels, forward and backward, compiled with a mask policy of our own, and checked against brute force.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "dilated_window.h"

#define FLASHSDK_ISA_NS app  // the namespace of the kernels compiled here, with this project's flags
#include <flashsdk/kernels/cpu/backward.h>
#include <flashsdk/kernels/cpu/forward.h>

namespace {

constexpr int kHeadDim = 64;
template <class Policy>
using Forward = flashsdk::cpu::app::Forward<float, kHeadDim, Policy, false>;
template <class Policy>
using Backward = flashsdk::cpu::app::Backward<float, kHeadDim, Policy, false>;

// The kernels bring no threads of their own.
void run_on_threads(void*, int num_threads, void (*fn)(void* context, int slot), void* context) {
  std::vector<std::thread> others;
  for (int slot = 1; slot < num_threads; ++slot) others.emplace_back(fn, context, slot);
  fn(context, 0);
  for (std::thread& other : others) other.join();
}

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

  // (seqlen, num_heads, head_dim), one batch.
  static flashsdk::TensorParam tensor(std::vector<float>& t, int heads) {
    return {t.data(), 0, std::int64_t{heads} * kHeadDim, kHeadDim};
  }
  flashsdk::BackwardParams params() {
    flashsdk::BackwardParams p;
    p.batch = 1;
    p.num_heads = num_heads;
    p.num_heads_kv = num_heads_kv;
    p.head_dim = p.head_dim_v = kHeadDim;
    p.seqlen_q = p.seqlen_k = seqlen;
    p.q = tensor(q, num_heads);
    p.k = tensor(k, num_heads_kv);
    p.v = tensor(v, num_heads_kv);
    p.out = tensor(out, num_heads);
    p.lse = {lse.data(), 0, seqlen, 1};  // (num_heads, seqlen)
    p.dout = tensor(dout, num_heads);
    p.dq = tensor(dq, num_heads);
    p.dk = tensor(dk, num_heads_kv);
    p.dv = tensor(dv, num_heads_kv);
    p.mask.user = &mask;
    p.score.softmax_scale = 1.f / std::sqrt(static_cast<float>(kHeadDim));
    return p;
  }

  // Milliseconds of one call.
  template <class Kernel>
  double run() {
    const flashsdk::BackwardParams p = params();
    flashsdk::LaunchContext context;
    context.parallel = {static_cast<int>(std::max(1u, std::thread::hardware_concurrency())), nullptr, run_on_threads};
    const std::size_t bytes = (Kernel::workspace_size(p, context.parallel.num_threads) + 255) / 256 * 256;
    context.workspace = std::aligned_alloc(256, bytes);
    const auto start = std::chrono::steady_clock::now();
    Kernel::launch(p, context);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    std::free(context.workspace);
    return time.count();
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
    problem.run<Forward<DilatedWindowPolicy>>();
    problem.run<Backward<DilatedWindowPolicy>>();
    const double error = BruteForce(problem).error();
    const bool ok = error < 2e-5;
    std::printf("window %2d, dilation %2d: largest error of out, lse, dq, dk, dv %.1e  %s\n", mask.window,
                mask.dilation, error, ok ? "ok" : "WRONG");
    good &= ok;
  }

  Problem problem(4096, 2, 2, {64, 4});
  problem.run<Forward<flashsdk::DensePolicy>>();  // warm up
  const double dense = problem.run<Forward<flashsdk::DensePolicy>>() + problem.run<Backward<flashsdk::DensePolicy>>();
  const double ours = problem.run<Forward<DilatedWindowPolicy>>() + problem.run<Backward<DilatedWindowPolicy>>();
  std::printf(
      "seqlen 4096, window 64, dilation 4: %.0f ms; without a mask %.0f ms (tiles outside the window are skipped)\n",
      ours, dense);
  return good ? 0 : 1;
}
