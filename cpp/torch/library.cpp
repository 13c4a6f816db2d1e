// libflashsdk_torch: the operators for programs without Python. Linking or loading it defines them.
#include <stdexcept>

#include "operators.h"

namespace flashsdk::torch_ops {
namespace {

bool current_stream([[maybe_unused]] int device, [[maybe_unused]] void** stream) {
#if FLASHSDK_TORCH_ON_GPU
  return aoti_torch_get_current_cuda_stream(device, stream) == AOTI_TORCH_SUCCESS;
#else
  return false;
#endif
}

void raise(const Failure& failure) { throw std::runtime_error(failure.message); }

[[maybe_unused]] const bool g_registered = [] {
  register_operators({&core_api(), current_stream, raise, aoti_torch_empty_strided}, /*define=*/true);
  return true;
}();

}  // namespace
}  // namespace flashsdk::torch_ops
