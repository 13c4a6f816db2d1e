#include "arguments.h"

#include <ATen/Context.h>
#include <ATen/ops/full.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <limits>

#include "gil.h"
#include "module.h"
#include "watched.h"

namespace flashsdk::torch_eager {
namespace {

bool read_limit(PyObject* band, PyObject* name, std::int64_t& limit) {
  const auto given = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(band, name));
  if (!given) throw python_error();
  return given.is_none() || read_integer(given.ptr(), limit);
}

}  // namespace

bool read_tensor(PyObject* given, at::Tensor& t) {
  if (!THPVariable_CheckExact(given)) return false;
  t = THPVariable_Unpack(given);
  return plain(t);
}

bool read_constant(PyObject* given, at::Tensor& t) {
  return given == Py_None || (read_tensor(given, t) && !recorded(t));
}

bool read_number(PyObject* given, double& x) {
  if (PyFloat_CheckExact(given)) {
    x = PyFloat_AS_DOUBLE(given);
    return true;
  }
  if (!PyLong_CheckExact(given)) return false;
  x = PyLong_AsDouble(given);
  if (x != -1. || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

bool read_scale(PyObject* given, Problem& p) {
  p.scaled = given != Py_None;
  return !p.scaled || read_number(given, p.softmax_scale);
}

bool read_integer(PyObject* given, std::int64_t& x) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow;
  x = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow == 0;
}

bool read_flag(PyObject* given, bool& x) {
  x = given == Py_True;
  return x || given == Py_False;
}

bool read_mask(PyObject* given, Problem& p) {
  static constinit python::MadeOnce kept_left, kept_right, kept_alignment;
  PyObject* const left = kept_left.get([] { return PyUnicode_InternFromString("left"); });
  PyObject* const right = kept_right.get([] { return PyUnicode_InternFromString("right"); });
  PyObject* const alignment = kept_alignment.get([] { return PyUnicode_InternFromString("alignment"); });
  if (given == Py_None || reinterpret_cast<PyObject*>(Py_TYPE(given)) == g_dense) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(given)) != g_band) return false;
  p.band = true;
  if (!read_limit(given, left, p.left) || !read_limit(given, right, p.right)) return false;
  const auto side = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(given, alignment));
  if (!side) throw python_error();
  p.top_left = PyUnicode_CompareWithASCIIString(side.ptr(), "top_left") == 0;
  return true;
}

bool read_backend(PyObject* given, std::string& backend) {
  if (given == Py_None) return true;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(given) ? PyUnicode_AsUTF8AndSize(given, &size) : nullptr;
  if (text == nullptr) PyErr_Clear();
  backend.assign(text == nullptr ? "" : text, static_cast<std::size_t>(size));
  return !backend.empty();
}

bool read_deterministic(PyObject* given, bool& deterministic) {
  if (given != Py_None) return read_flag(given, deterministic);
  deterministic = at::globalContext().deterministicAlgorithms();
  return true;
}

bool read_lengths(PyObject* const* given, Problem& p) {
  p.packed = true;
  return read_tensor(given[0], p.cu_seqlens_q) && read_tensor(given[1], p.cu_seqlens_k) &&
         read_integer(given[2], p.max_seqlen_q) && read_integer(given[3], p.max_seqlen_k);
}

bool read_more(PyObject* const* given, Problem& p) {
  if (given[0] != Py_None && !read_tensor(given[0], p.sink)) return false;
  if (!read_constant(given[1], p.seqused_q) || !read_constant(given[2], p.seqused_k) ||
      !read_constant(given[3], p.block_table))
    return false;
  if (given[4] == Py_None) return true;
  constexpr std::int64_t kMostSplits = std::int64_t{1} << 30;
  return read_integer(given[4], p.num_splits) && p.num_splits >= 1 && p.num_splits <= kMostSplits;
}

bool read_qkv(PyObject* const* given, int rank, std::array<at::Tensor, 3>& qkv) {
  for (int i = 0; i < 3; ++i)
    if (!read_tensor(given[i], qkv[i]) || qkv[i].dim() != rank) return false;
  return true;
}

bool read_seed(PyObject* given, Problem& p) {
  if (given == Py_None) return true;
  if (!PyLong_CheckExact(given)) return read_tensor(given, p.seed) && p.seed.numel() != 1;
  const std::uint64_t seed = PyLong_AsUnsignedLongLong(given);
  if (seed == static_cast<std::uint64_t>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  if (p.dropout_p == 0.) return true;
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  p.seed = at::full({1}, static_cast<std::int64_t>(seed), options);
  return true;
}

}  // namespace flashsdk::torch_eager
