#include "skip_autograd.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "watched.h"

namespace flashsdk::torch_eager {
namespace {

// Nobody looks on, and autograd does not either.
bool nothing_to_record(const torch::jit::Stack& stack, std::size_t count) {
  if (!unwatched()) return false;
  for (const c10::IValue& value : torch::jit::last(stack, count))
    if (value.isTensor() && (!plain_or_none(value.toTensor()) || recorded(value.toTensor()))) return false;
  return true;
}

// A kernel in Python takes longer than all else that a small call costs. A compiled model calls one twice a layer, and
// the device may wait for it.
class SkipAutograd final : public c10::OperatorKernel {
 public:
  explicit SkipAutograd(c10::SafeKernelFunction in_python) : in_python_(std::move(in_python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!nothing_to_record(*stack, op.schema().arguments().size())) return in_python_.callBoxed(op, keys, stack);
    const at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }

 private:
  c10::SafeKernelFunction in_python_;
};

PyObject* skip_autograd(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* name;
  if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow((std::string("flashsdk::") + name).c_str(), "");
  // Never destroyed: that would take the kernels away from whoever runs at exit.
  static auto& made = *new std::map<std::string, std::vector<std::unique_ptr<torch::Library>>>;
  made[name].clear();  // Python may have been imported anew
  for (const c10::DispatchKey key : {c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA}) {
    auto kernel = std::make_unique<SkipAutograd>(op.getComputedKernelForDispatchKey(key));
    auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "flashsdk", key, __FILE__, __LINE__);
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    made[name].push_back(std::move(library));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef const kSkipAutograd{"skip_autograd", skip_autograd, METH_VARARGS, nullptr};

}  // namespace flashsdk::torch_eager
