#include "flashsdk/registry.h"

#include "flashsdk/version.h"
#include "kernel_registry.h"
#include "pack_heads.h"
#include "validate.h"

namespace flashsdk {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

template <class Args>
Explanation explain_as(const Args& args) {
  const auto asked = validate(args, Completeness::kQuery), taken = pack_query_heads(asked);
  Explanation why = KernelRegistry::instance().explain(taken, forced_backend(args));
  if (const int rows = asked.num_heads / taken.num_heads; rows > 1)
    why.packing = "query heads packed: " + std::to_string(rows) + " rows a head of keys";
  return why;
}

}  // namespace

std::vector<KernelInfo> kernels() { return KernelRegistry::instance().list(); }

Explanation explain(const ForwardArgs& args) { return explain_as(args); }
Explanation explain(const BackwardArgs& args) { return explain_as(args); }

BuildInfo build_info() {
  const KernelRegistry& registry = KernelRegistry::instance();
  BuildInfo info;
  info.version = FLASHSDK_VERSION;
  info.compiler = kCompiler;
  info.compiler.erase(info.compiler.find_last_not_of(' ') + 1);  // Debian's Clang ends with one
  info.cpu_isas = registry.cpu_isas();
  info.cpu_isa = registry.cpu_isa();
  info.cpu_head_dim = registry.cpu_head_dim();
  info.cuda = FLASHSDK_HAVE_CUDA != 0;
  info.cuda_archs = registry.cuda_archs();
  info.nvtx = FLASHSDK_HAVE_NVTX != 0;
  return info;
}

}  // namespace flashsdk
