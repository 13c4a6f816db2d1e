#include "flashsdk/registry.h"

#include "flashsdk/version.h"
#include "kernel_registry.h"
#include "validate.h"

namespace flashsdk {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

}  // namespace

std::vector<KernelInfo> kernels() { return KernelRegistry::instance().list(); }

Explanation explain(const ForwardArgs& args) {
  return KernelRegistry::instance().explain(Op::kForward, validate(args, Completeness::kQuery), forced_backend(args));
}

Explanation explain(const BackwardArgs& args) {
  return KernelRegistry::instance().explain(Op::kBackward, validate(args, Completeness::kQuery), forced_backend(args));
}

BuildInfo build_info() {
  const KernelRegistry& registry = KernelRegistry::instance();
  BuildInfo info;
  info.version = FLASHSDK_VERSION;
  info.compiler = kCompiler;
  info.cpu_isas = registry.cpu_isas();
  info.cpu_isa = registry.cpu_isa();
  info.cuda = FLASHSDK_HAVE_CUDA != 0;
  info.cuda_archs = registry.cuda_archs();
  return info;
}

}  // namespace flashsdk
