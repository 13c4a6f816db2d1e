#include "functions.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "arguments.h"
#include "core_call.h"
#include "node.h"
#include "watched.h"

namespace flashsdk::torch_eager {
namespace {

enum class Return : std::uint8_t { kOut, kOutAndLse, kWithProbs };

// What torch.autocast does for scaled_dot_product_attention.
void autocast(std::array<at::Tensor, 3>& qkv) {
  const auto device = qkv[0].device().type();
  if (!at::autocast::is_autocast_enabled(device)) return;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (at::Tensor& x : qkv)
    if (x.is_floating_point() && x.scalar_type() != at::kDouble && x.scalar_type() != at::kFloat8_e4m3fn)
      x = x.to(dtype);
}

pybind11::object wrapped(at::Tensor x) {
  auto result = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(x)));
  if (!result) throw python_error();
  return result;
}

// nullptr, and no error set, where the call is not for this way.
PyObject* attend(Problem& p, std::array<at::Tensor, 3>& qkv, Return wanted) {
  autocast(qkv);
  const auto& [q, k, v] = qkv;
  at::Tensor out, lse;
  const bool trained = recorded(q, k, v, p.sink);
  if (trained && p.block_table.defined()) return nullptr;  // pages have no backward
  if (!forward(p, q, k, v, out, lse)) return nullptr;
  if (trained) record(p, q, k, v, out, lse, wanted != Return::kOut);
  if (wanted == Return::kOut) return wrapped(std::move(out)).release().ptr();
  const int count = wanted == Return::kWithProbs ? 3 : 2;
  auto result = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(count));
  if (!result) throw python_error();
  if (count == 3) PyTuple_SET_ITEM(result.ptr(), 2, wrapped(at::empty({0}, out.options())).release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 0, wrapped(std::move(out)).release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 1, wrapped(std::move(lse)).release().ptr());
  return result.release().ptr();
}

[[noreturn]] void fail_count(const char* name, const char* expected, Py_ssize_t count) {
  throw torch::TypeError(std::string(name) + "() takes " + expected + " arguments; " + std::to_string(count) +
                         " were given");
}

}  // namespace

PyObject* attention(PyObject* const* given, Py_ssize_t count) {
  if (count != 18 && count != 22) fail_count("attention", "18 or 22", count);
  Problem p;
  std::array<at::Tensor, 3> qkv;
  bool return_lse;
  if ((count == 22 && !read_lengths(given + 18, p)) || !read_more(given + 13, p) ||
      !read_qkv(given, p.packed ? 3 : 4, qkv) || !read_mask(given[3], p) || !read_constant(given[4], p.bias) ||
      !read_constant(given[5], p.alibi_slopes) || !read_scale(given[6], p) || !read_number(given[7], p.softcap) ||
      !read_number(given[8], p.dropout_p) || !read_flag(given[10], return_lse) ||
      !read_deterministic(given[11], p.deterministic) || !read_backend(given[12], p.backend) || !read_seed(given[9], p))
    return nullptr;
  return attend(p, qkv, return_lse ? Return::kOutAndLse : Return::kOut);
}

PyObject* flash_attn(PyObject* const* given, Py_ssize_t count) {
  if (count != 12) fail_count("flash_attn", "12", count);
  Problem p;
  std::array<at::Tensor, 3> qkv;
  bool causal, deterministic, return_probs;
  if (given[3] != Py_None) {
    if (!PyTuple_CheckExact(given[3]) || PyTuple_GET_SIZE(given[3]) != 4)
      throw torch::TypeError("flash_attn(): lengths are a tuple of four, or None");
    if (!read_lengths(PySequence_Fast_ITEMS(given[3]), p)) return nullptr;
  }
  if (!read_qkv(given, p.packed ? 3 : 4, qkv) || !read_number(given[4], p.dropout_p) || !read_scale(given[5], p) ||
      !read_flag(given[6], causal) || !read_number(given[8], p.softcap) || !read_constant(given[9], p.alibi_slopes) ||
      !read_flag(given[10], deterministic) || !read_flag(given[11], return_probs) ||
      (return_probs && p.dropout_p != 0.))
    return nullptr;
  std::int64_t left, right;  // negative is unlimited
  if (!PyTuple_CheckExact(given[7]) || PyTuple_GET_SIZE(given[7]) != 2 ||
      !read_integer(PyTuple_GET_ITEM(given[7], 0), left) || !read_integer(PyTuple_GET_ITEM(given[7], 1), right))
    return nullptr;
  p.band = causal || left >= 0 || right >= 0;
  if (left >= 0) p.left = std::min(left, kUnlimited);
  if (causal) {
    p.right = 0;
  } else if (right >= 0) {
    p.right = std::min(right, kUnlimited);
  }
  if (p.softcap < 0.) p.softcap = 0.;
  read_deterministic(deterministic ? Py_True : Py_None, p.deterministic);
  for (at::Tensor& x : qkv) x = with_last_contiguous(x);
  return attend(p, qkv, return_probs ? Return::kWithProbs : Return::kOut);
}

PyObject* scaled_dot_product_attention(PyObject* const* given, Py_ssize_t count) {
  if (count != 8) fail_count("scaled_dot_product_attention", "8", count);
  const auto& backends = at::globalContext();
  if (!backends.userEnabledFlashSDP() && !backends.userEnabledMemEfficientSDP() && !backends.userEnabledCuDNNSDP())
    return nullptr;  // PyTorch's math is asked for
  Problem p;
  p.heads_first = true;
  std::array<at::Tensor, 3> qkv;
  bool is_causal, gqa;
  if (!read_qkv(given, 4, qkv) || !read_constant(given[3], p.bias) || !read_number(given[4], p.dropout_p) ||
      !read_flag(given[5], is_causal) || !read_scale(given[6], p) || !read_flag(given[7], gqa))
    return nullptr;
  const auto& [q, k, v] = qkv;
  const std::int64_t heads = q.size(1), heads_kv = k.size(1);
  if (k.size(0) != q.size(0) || v.size(0) != q.size(0) || v.size(1) != heads_kv || heads == 0 || heads_kv == 0 ||
      (heads != heads_kv && heads_kv != 1 && (!gqa || heads % heads_kv != 0)))
    return nullptr;
  if (is_causal) {
    if (p.bias.defined()) return nullptr;
    p.band = p.top_left = true;
    p.right = 0;
  }
  if (p.bias.defined()) {
    while (p.bias.dim() < 4) p.bias = p.bias.unsqueeze(0);
    if (p.bias.dim() > 4 || p.bias.stride(3) != 1) return nullptr;
  }
  for (at::Tensor& x : qkv) x = with_last_contiguous(x);
  return attend(p, qkv, Return::kOut);
}

}  // namespace flashsdk::torch_eager
