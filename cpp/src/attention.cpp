// Validate, pack, select, launch.
#include "flashsdk/attention.h"

#include <memory>
#include <utility>
#include <variant>

#include "check.h"
#if FLASHSDK_HAVE_CUDA
#include "cuda/host/context.h"
#include "cuda/host/device.h"
#endif
#include "kernel_registry.h"
#include "pack_heads.h"
#include "planned_call.h"
#include "processors.h"
#include "profiler_range.h"
#include "thread_pool.h"
#include "unused_rows.h"
#include "validate.h"

namespace flashsdk {
namespace {

constexpr std::size_t kWorkspaceAlignment = 256;

void check_call(const AttentionArgs& args, bool packed) {
  const bool given = args.cu_seqlens_q.given() || args.cu_seqlens_k.given();
  if (given && !packed)
    fail("cu_seqlens_q", "given", "none; packed sequences are for mha_varlen_fwd and mha_varlen_bwd");
  if (!given && packed) fail("cu_seqlens_q", "not given", "a tensor; batches are for mha_fwd and mha_bwd");
}

template <class Args>
auto plan_as(const Args& args, Completeness completeness) {
  PlannedCall<decltype(validate(args))> result{pack_query_heads(validate(args, completeness)), nullptr, 0, 0};
  const auto& p = result.params;
  result.entry = &KernelRegistry::instance().select(p, forced_backend(args));
  result.num_threads = p.device.type == DeviceType::kCPU ? num_threads() : 1;
  result.workspace_size = result.entry->workspace_size(p, result.num_threads);
  return result;
}

// As the functions of C++ and Python are called.
constexpr const char* function_of(const BackwardParams& p) {
  return p.cu_seqlens_q != nullptr ? "mha_varlen_bwd" : "mha_bwd";
}
constexpr const char* function_of(const ForwardParams& p) {
  return p.cu_seqlens_q != nullptr ? "mha_varlen_fwd" : "mha_fwd";
}

void check_workspace(const Workspace& given, std::size_t needed) {
  if (given.size < needed)
    fail("workspace", std::to_string(given.size) + " bytes", "at least workspace_size(), " + std::to_string(needed));
  if (needed == 0) return;
  if (given.data == nullptr) fail("workspace", "a null pointer", std::to_string(needed) + " bytes");
  if (reinterpret_cast<std::uintptr_t>(given.data) % kWorkspaceAlignment != 0)
    fail("workspace", "its address is not a multiple of 256", "256-byte aligned");
}

}  // namespace

template <class Params>
void PlannedCall<Params>::launch(const LaunchOptions& options) const {
  const bool on_cpu = params.device.type == DeviceType::kCPU;
  if (on_cpu && options.stream != nullptr) fail("stream", "given", "none, as q is on cpu");
#if FLASHSDK_HAVE_CUDA
  if (!on_cpu) cuda::check_stream(options.stream, params.device.index);
#endif
  check_workspace(options.workspace, workspace_size);
#if FLASHSDK_HAVE_CUDA
  if (!on_cpu) cuda::bind_context(params.device.index);
#endif
  const ProfilerRange range(function_of(params));
  entry->launch(params, {options.workspace.data, options.stream, parallel_runner(num_threads)});
  if (on_cpu) write_unused_rows(params);
}

template struct PlannedCall<ForwardParams>;
template struct PlannedCall<BackwardParams>;

PlannedCall<ForwardParams> plan_call(const ForwardArgs& args, bool packed) {
  check_call(args, packed);
  return plan_as(args, Completeness::kLaunch);
}

PlannedCall<BackwardParams> plan_call(const BackwardArgs& args, bool packed) {
  check_call(args, packed);
  return plan_as(args, Completeness::kLaunch);
}

std::size_t workspace_size(const ForwardArgs& args) { return plan_as(args, Completeness::kQuery).workspace_size; }
std::size_t workspace_size(const BackwardArgs& args) { return plan_as(args, Completeness::kQuery).workspace_size; }

struct Plan::Call {
  std::variant<ForwardArgs, BackwardArgs> args;
  std::variant<PlannedCall<ForwardParams>, PlannedCall<BackwardParams>> planned;

  template <class Args>
  static std::shared_ptr<const Call> of(const Args& args) {
    return std::make_shared<Call>(Call{args, plan_as(args, Completeness::kLaunch)});
  }
};

namespace {
// Whether the host reads what some tensors contain: then that decides what is launched, too.
template <class Params>
bool reads_contents(const Params& p) {
  return p.device.type == DeviceType::kCPU && (p.ragged() || p.mask.kind == MaskKind::kBlockSparse);
}
}  // namespace

Plan::Plan(std::shared_ptr<const Call> call) noexcept : call_(std::move(call)) {}

std::size_t Plan::workspace_size() const noexcept {
  return std::visit([](const auto& planned) { return planned.workspace_size; }, call_->planned);
}
void Plan::launch(const LaunchOptions& options) const {
  const auto again = [&](const auto& args) { plan_as(args, Completeness::kLaunch).launch(options); };
  const auto once = [&](const auto& planned) {
    if (reads_contents(planned.params))
      std::visit(again, call_->args);
    else
      planned.launch(options);
  };
  std::visit(once, call_->planned);
}

Plan plan(const ForwardArgs& args) { return Plan(Plan::Call::of(args)); }
Plan plan(const BackwardArgs& args) { return Plan(Plan::Call::of(args)); }

void mha_fwd(const ForwardArgs& args, const LaunchOptions& options) { plan_call(args, false).launch(options); }
void mha_bwd(const BackwardArgs& args, const LaunchOptions& options) { plan_call(args, false).launch(options); }
void mha_varlen_fwd(const ForwardArgs& args, const LaunchOptions& options) { plan_call(args, true).launch(options); }
void mha_varlen_bwd(const BackwardArgs& args, const LaunchOptions& options) { plan_call(args, true).launch(options); }

void set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads) fail("n", std::to_string(n), "1 to " + std::to_string(kMaxThreads));
  set_pool_threads(n);
}
int get_num_threads() { return num_threads(); }

}  // namespace flashsdk
