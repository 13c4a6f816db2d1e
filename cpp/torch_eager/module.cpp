// flashsdk._torch_native: attention of eager PyTorch from Python's arguments to the core and back, with its gradient as
// a node of autograd, in C++ throughout. Built for one series of PyTorch, whose C++ interface changes with each.
//
// Every function returns None where a call is not for it: other types than the usual ones, somebody who looks on, or an
// argument that the core refuses. Then flashsdk.torch goes its way in Python, which has the messages.
#include "module.h"

#include <ATen/ops/empty_strided.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <string>
#include <utility>

#include "core_call.h"
#include "functions.h"
#include "operators.h"
#include "sdpa.h"
#include "sdpa_call.h"
#include "skip_autograd.h"
#include "watched.h"

namespace flashsdk::torch_eager {

const CoreApi* g_core = nullptr;
const DLPackExchangeAPI* g_exchange = nullptr;
PyObject *g_dense = nullptr, *g_band = nullptr;

namespace {

using Function = PyObject* (*)(PyObject* const* given, Py_ssize_t count);

// A function of the module: None where `function` gives nullptr, PyTorch's exceptions as they are.
template <Function function>
PyObject* guarded(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* const result = unwatched() ? function(given, count) : nullptr;
  if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <Function function>
constexpr PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded<function>)), METH_FASTCALL, nullptr};
}

pybind11::object attribute(const char* module, const char* name) {
  return pybind11::module_::import(module).attr(name);
}

// As aoti_torch_empty_strided, with PyTorch's own exceptions: torch.OutOfMemoryError is one.
AOTITorchError empty_strided(std::int64_t rank, const std::int64_t* sizes, const std::int64_t* strides,
                             std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                             AtenTensorHandle* made) {
  const c10::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index));
  const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype)).device(device);
  const auto extent = static_cast<std::size_t>(rank);
  *made = torch::aot_inductor::new_tensor_handle(at::empty_strided({sizes, extent}, {strides, extent}, options));
  return AOTI_TORCH_SUCCESS;
}

// Gives the operators, which Python has defined, kernels for CPU and CUDA; once.
PyObject* register_operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  static bool done = false;
  if (!std::exchange(done, true)) {
    torch_ops::register_operators({g_core, current_stream, raise, empty_strided}, /*define=*/false);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Whether this is for that PyTorch. FLASHSDK_TORCH_VERSION is the series of the release that this was built with, 2.13.
// That takes 2.13.0, 2.13.1 and 2.13.0+cu130: within a series libtorch's classes are not meant to change. Headers of a
// PyTorch for CPUs serve one for GPUs, whose streams are asked for through DLPack and no header of CUDA. It takes no
// nightly, 2.13.0.dev20260401, nor what else is before 2.13.0: there the classes may be any. Built with one, it is that
// alone.
bool is_for(const std::string& torch) {
  const std::string version = FLASHSDK_TORCH_VERSION;
  if (torch == version) return true;
  if (!torch.starts_with(version + '.')) return false;
  const std::string patch = torch.substr(version.size() + 1, torch.find('+') - version.size() - 1);
  return !patch.empty() && patch.find_first_not_of("0123456789") == std::string::npos;
}

// Before anything else: another series has other classes of the same names.
void check_torch() {
  const std::string here = pybind11::cast<std::string>(attribute("torch", "__version__").attr("__str__")());
  if (!is_for(here))
    throw pybind11::import_error("flashsdk._torch_native is for PyTorch " FLASHSDK_TORCH_VERSION "; here is " + here);
}

void find_others() {
  const auto core = attribute("flashsdk._bindings", "core_api");
  g_core = static_cast<const CoreApi*>(PyCapsule_GetPointer(core.ptr(), "flashsdk.core_api"));
  if (g_core == nullptr) throw pybind11::error_already_set();
  if (g_core->layout != CoreApi::kLayout)
    throw pybind11::import_error("flashsdk._torch_native and flashsdk._bindings are of different builds");
  const auto tensor = attribute("torch", "Tensor");
  if (pybind11::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    const pybind11::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    g_exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (g_exchange == nullptr) PyErr_Clear();
  }
  g_dense = attribute("flashsdk.masks", "Dense").release().ptr();
  g_band = attribute("flashsdk.masks", "Band").release().ptr();
}

}  // namespace

void raise(const Failure& failure) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object type = attribute("flashsdk._errors", "Error");
  PyErr_SetObject(type.ptr(), type(failure.message, failure.code).ptr());
  python_error error;
  error.persist();
  throw error;
}

}  // namespace flashsdk::torch_eager

PyMODINIT_FUNC PyInit__torch_native() {
  namespace py = flashsdk::torch_eager;
  static PyMethodDef methods[] = {
      py::method<py::attention>("attention"),
      py::method<py::flash_attn>("flash_attn"),
      py::method<py::scaled_dot_product_attention>("scaled_dot_product_attention"),
      {"register_operators", py::register_operators, METH_NOARGS, nullptr},
      py::kSkipAutograd,
      flashsdk::torch_sdpa::kOverrideSdpa,
      flashsdk::torch_sdpa::kRestoreSdpa,
      flashsdk::torch_sdpa::kWatchSdpa,
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "flashsdk._torch_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  try {
    py::check_torch();
    py::find_others();
    flashsdk::torch_sdpa::set_sdpa_host({py::g_core, py::current_stream, py::raise, py::empty_strided});
    return PyModule_Create(&definition);
  } catch (pybind11::error_already_set& e) {
    // flashsdk.torch does without, as it does where the module is not there.
    if (e.matches(PyExc_ImportError) || !e.matches(PyExc_Exception)) {
      e.restore();
    } else {
      pybind11::raise_from(e, PyExc_ImportError, "flashsdk._torch_native finds not what it needs");
    }
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
  }
  return nullptr;
}
