// flashsdk in a libtorch program that trains: a check of its output and gradients by the definition in double.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "attention.h"

namespace {

using flashsdk::torch::attention;
using flashsdk::torch::AttentionOptions;
using Tensors = std::vector<at::Tensor>;

Tensors gradients(const at::Tensor& root, const Tensors& leaves) {
  return torch::autograd::grad({root}, leaves, {}, /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

// softmax(q·k^T / sqrt(head_dim))·v and its log-sum-exp, from the definition.
std::tuple<at::Tensor, at::Tensor> definition(const Tensors& x, bool causal) {
  const at::Tensor q = x[0].transpose(1, 2), k = x[1].transpose(1, 2), v = x[2].transpose(1, 2);
  at::Tensor scores = q.matmul(k.mT()) / std::sqrt(static_cast<double>(q.size(-1)));
  if (causal) {
    const at::Tensor later = at::ones({q.size(2), k.size(2)}, at::kBool).triu(1 + k.size(2) - q.size(2));
    scores = scores.masked_fill(later, -INFINITY);
  }
  return {scores.softmax(-1).matmul(v).transpose(1, 2), scores.logsumexp(-1)};
}

bool close(const char* name, const at::Tensor& a, const at::Tensor& b) {
  const double error = (a - b).abs().max().item<double>();
  std::printf("  %-4s max error %.1e\n", name, error);
  return error < 2e-5;
}

bool check(bool causal) {
  at::manual_seed(0);
  Tensors x, in_double;
  for (int rows : {70, 90, 90}) {
    x.push_back(at::randn({2, rows, 4, 32}).requires_grad_());
    in_double.push_back(x.back().detach().to(at::kDouble).requires_grad_());
  }
  const auto [out, lse] = attention(x[0], x[1], x[2], causal ? AttentionOptions::causal() : AttentionOptions());
  const auto [want, want_lse] = definition(in_double, causal);
  std::printf("%s\n", causal ? "causal" : "all keys");
  bool ok = close("out", out, want) && close("lse", lse, want_lse);
  const at::Tensor weight = at::randn_like(want), of_lse = at::randn_like(want_lse);
  const Tensors got = gradients((out * weight).sum() + (lse * of_lse).sum(), x);
  const Tensors expected = gradients((want * weight).sum() + (want_lse * of_lse).sum(), in_double);
  const char* names[] = {"dq", "dk", "dv"};
  for (int i = 0; i < 3; ++i) ok = close(names[i], got[i], expected[i]) && ok;
  // Through lse alone nothing reaches v.
  const Tensors alone = gradients(std::get<1>(attention(x[0], x[1], x[2])).sum(), x);
  return ok && alone[2].abs().max().item<double>() == 0.;
}

// Forward and backward drop the same: the gradient of the sum of out along v is linear in what was kept.
bool check_dropout() {
  AttentionOptions options;
  options.dropout_p = 0.5;
  Tensors x;
  for (int i = 0; i < 3; ++i) x.push_back(at::randn({1, 40, 2, 16}).requires_grad_());
  const at::Tensor out = std::get<0>(attention(x[0], x[1], x[2], options));
  const at::Tensor dv = gradients(out.sum(), x)[2];
  std::printf("dropout\n");
  return close("dv·v", (dv * x[2]).sum(), out.sum());
}

bool check_error() {
  try {
    attention(at::zeros({1, 8, 4, 16}), at::zeros({1, 8, 3, 16}), at::zeros({1, 8, 3, 16}));
  } catch (const std::exception& e) {
    std::printf("refused: %s\n", e.what());
    return std::string(e.what()).rfind("k: num_heads_kv 3; a divisor of num_heads", 0) == 0;
  }
  return false;
}

// No second derivative: an error, also where the first one is of a sum, whose gradient is a constant.
bool check_second() {
  Tensors x;
  for (int i = 0; i < 3; ++i) x.push_back(at::randn({1, 8, 2, 16}).requires_grad_());
  const at::Tensor out = std::get<0>(attention(x[0], x[1], x[2]));
  try {
    torch::autograd::grad({out.sum()}, x, {}, /*retain_graph=*/true, /*create_graph=*/true);
  } catch (const std::exception& e) {
    return std::string(e.what()).find("create_graph: True; False") != std::string::npos;
  }
  return false;
}

}  // namespace

int main() {
  const bool ok = check(false) & check(true) & check_dropout() & check_error() & check_second();
  std::printf(ok ? "ok\n" : "FAILED\n");
  return ok ? 0 : 1;
}
