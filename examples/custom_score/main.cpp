// CPU kernels with T5's bias, forward and backward, against the definition in double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "t5_bias.h"

#define FLASHSDK_ISA_NS app  // the namespace of the kernels compiled here, with this project's flags
#include <flashsdk/kernels/common/own_kernel.h>
#include <flashsdk/kernels/cpu/backward.h>
#include <flashsdk/kernels/cpu/forward.h>

namespace {

constexpr int kHeadDim = 64, kSeqlen = 333, kHeads = 3, kBuckets = 32, kMaxDistance = 128;

// Kernels of one row: dtype, head_dim, policy, and that they have score features.
template <class Policy>
constexpr auto kForward = flashsdk::cpu::app::forward_entry<float, kHeadDim, Policy, true>();
template <class Policy>
constexpr auto kBackward = flashsdk::cpu::app::backward_entry<float, kHeadDim, Policy, true>();

// (1, seqlen, heads, head_dim), and (1, heads, seqlen).
struct Tensors {
  std::vector<float> q, k, v, out, dout, dq, dk, dv, lse, learned;

  Tensors() {
    for (auto* t : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) t->resize(kSeqlen * kHeads * kHeadDim);
    lse.resize(kHeads * kSeqlen);
    learned.resize(kBuckets * kHeads);
    std::mt19937 rng(0);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &k, &v, &dout, &learned})
      for (float& x : *t) x = normal(rng);
  }
  static flashsdk::TensorView view(std::vector<float>& t) {
    return {t.data(), flashsdk::DType::kFloat32, {1, kSeqlen, kHeads, kHeadDim}};
  }
  flashsdk::TensorView lse_view() { return {lse.data(), flashsdk::DType::kFloat32, {1, kHeads, kSeqlen}}; }
};

void launch(const flashsdk::Plan& plan) {
  const std::size_t bytes = (plan.workspace_size() + 255) / 256 * 256;
  void* memory = std::aligned_alloc(256, bytes);
  plan.launch({{memory, bytes}});
  std::free(memory);
}

template <class Policy>
void attend(Tensors& t, const flashsdk::Mask& mask, const T5Bias& bias) {
  flashsdk::ForwardArgs forward;
  forward.q = t.view(t.q), forward.k = t.view(t.k), forward.v = t.view(t.v), forward.mask = mask;
  forward.out = t.view(t.out), forward.lse = t.lse_view();
  launch(flashsdk::plan_own(forward, kForward<Policy>, &bias));

  flashsdk::BackwardArgs backward;
  backward.q = forward.q, backward.k = forward.k, backward.v = forward.v, backward.mask = mask;
  backward.out = forward.out, backward.lse = forward.lse, backward.dout = t.view(t.dout);
  backward.dq = t.view(t.dq), backward.dk = t.view(t.dk), backward.dv = t.view(t.dv);
  launch(flashsdk::plan_own(backward, kBackward<Policy>, &bias));
}

// The same, one element at a time. The largest difference to what the kernels have found.
double largest_error(const Tensors& t, bool causal) {
  const double scale = 1 / std::sqrt(double{kHeadDim});
  double error = 0;
  const auto note = [&](double ours, double expected) {
    const double difference = std::fabs(ours - expected);
    if (std::isnan(difference) || difference > error) error = difference;  // NaN stays
  };
  for (int h = 0; h < kHeads; ++h) {
    const auto at = [&](int row, int c) { return (row * kHeads + h) * kHeadDim + c; };
    const auto dot = [&](const std::vector<float>& a, int i, const std::vector<float>& b, int j) {
      double sum = 0;
      for (int c = 0; c < kHeadDim; ++c) sum += double{a[at(i, c)]} * b[at(j, c)];
      return sum;
    };
    std::vector<double> dk(kSeqlen * kHeadDim), dv(dk);
    for (int i = 0; i < kSeqlen; ++i) {
      const int keys = causal ? i + 1 : kSeqlen;
      std::vector<double> p(keys), dp(keys), out(kHeadDim), dq(kHeadDim);
      double sum = 0, delta = 0;
      for (int j = 0; j < keys; ++j) {
        p[j] = std::exp(scale * dot(t.q, i, t.k, j) + t.learned[t5_bucket(j - i, kBuckets, kMaxDistance) * kHeads + h]);
        sum += p[j];
      }
      for (int j = 0; j < keys; ++j) {
        p[j] /= sum;
        dp[j] = dot(t.dout, i, t.v, j);
        delta += p[j] * dp[j];
        for (int c = 0; c < kHeadDim; ++c) out[c] += p[j] * t.v[at(j, c)];
      }
      for (int j = 0; j < keys; ++j)
        for (int c = 0; c < kHeadDim; ++c) {
          dq[c] += p[j] * (dp[j] - delta) * scale * t.k[at(j, c)];
          dk[j * kHeadDim + c] += p[j] * (dp[j] - delta) * scale * t.q[at(i, c)];
          dv[j * kHeadDim + c] += p[j] * t.dout[at(i, c)];
        }
      for (int c = 0; c < kHeadDim; ++c) {
        note(t.out[at(i, c)], out[c]);
        note(t.dq[at(i, c)], dq[c]);
      }
      note(t.lse[h * kSeqlen + i], std::log(sum));
    }
    for (int j = 0; j < kSeqlen; ++j)
      for (int c = 0; c < kHeadDim; ++c) {
        note(t.dk[at(j, c)], dk[j * kHeadDim + c]);
        note(t.dv[at(j, c)], dv[j * kHeadDim + c]);
      }
  }
  return error;
}

}  // namespace

int main() {
  bool good = true;
  Tensors t;
  const std::vector<float> table = t5_by_distance(t.learned, kHeads, kBuckets, kMaxDistance);
  const T5Bias bias{table.data(), kMaxDistance};
  for (const bool causal : {false, true}) {
    if (causal)
      attend<T5Policy<flashsdk::BandPolicy>>(t, flashsdk::Causal(), bias);
    else
      attend<T5Policy<flashsdk::DensePolicy>>(t, flashsdk::Dense{}, bias);
    const double error = largest_error(t, causal);
    std::printf("%s: largest error of out, lse, dq, dk, dv %.1e  %s\n", causal ? "causal" : "no mask", error,
                error < 2e-5 ? "ok" : "WRONG");
    good &= error < 2e-5;
  }
  return good ? 0 : 1;
}
