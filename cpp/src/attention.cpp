// Validate, pack, select, launch.
#include "flashsdk/attention.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "check.h"
#include "common/own_kernel.h"
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

template <class Params>
PlannedCall<Params> planned(const Params& p, const KernelEntry<Params>& entry) {
  const int threads = p.device.type == DeviceType::kCPU ? num_threads() : 1;
  return {p, &entry, threads, entry.workspace_size(p, threads)};
}

template <class Args>
auto plan_as(const Args& args, Completeness completeness) {
  const auto p = pack_query_heads(validate(args, completeness));
  return planned(p, KernelRegistry::instance().select(p, forced_backend(args)));
}

// own_kernel.h.
template <class Params>
struct OwnKernel {
  KernelEntry<Params> entry;
  const void* user;
};

// Null, or why the kernel does not take the call.
template <class Params>
const char* refusal(const Params& p, const KernelEntry<Params>& entry) {
  const KernelKey& key = entry.key;
  if ((key.backend == Backend::kCpu) != (p.device.type == DeviceType::kCPU)) return "the tensors are on another device";
  if (key.dtype != p.dtype) return "the tensors are of another dtype";
  if (key.head_dim < p.head_dim || key.head_dim_v < p.head_dim_v) return "head_dim is larger than the kernel's";
  if (key.mask != p.mask.kind) return "the mask is of another kind";
  if (cuda::missing(key.features, p.score.features()) != Features::kNone) return "a feature is not compiled in";
  return entry.can_implement == nullptr ? nullptr : entry.can_implement(p);
}

template <class Args, class Params>
PlannedCall<Params> plan_as(const Args& args, const OwnKernel<Params>& own) {
  Params p = validate(args);
  p.mask.user = own.user;
  if (p.mask.kind == MaskKind::kDense) p.mask.kind = own.entry.key.mask;  // a band without limits, or a policy's own
  if (const char* reason = refusal(p, own.entry)) fail("entry", reason, "a kernel that takes the call");
  return planned(p, own.entry);
}

// As the functions of C++ and Python are called.
const char* function_of(const BackwardParams& p) { return p.packed() ? "mha_varlen_bwd" : "mha_bwd"; }
const char* function_of(const ForwardParams& p) { return p.packed() ? "mha_varlen_fwd" : "mha_fwd"; }

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

// How it is planned is kept as well: where the host reads what some tensors contain, that decides what is launched.
struct Plan::Call {
  virtual ~Call() = default;
  virtual std::size_t workspace_size() const noexcept = 0;
  virtual void launch(const LaunchOptions& options) const = 0;

  template <class MakePlan>
  static std::shared_ptr<const Call> by(MakePlan make);
};

namespace {

template <class Base, class MakePlan>
class CallOf final : public Base {
 public:
  explicit CallOf(MakePlan make) : make_(std::move(make)), planned_(make_()) {}

  std::size_t workspace_size() const noexcept override { return planned_.workspace_size; }
  void launch(const LaunchOptions& options) const override {
    const auto& p = planned_.params;
    const bool reads_contents =
        p.device.type == DeviceType::kCPU && (p.ragged() || std::holds_alternative<BlockMask>(make_.args.mask));
    if (reads_contents)
      make_().launch(options);
    else
      planned_.launch(options);
  }

 private:
  MakePlan make_;
  decltype(std::declval<const MakePlan&>()()) planned_;  // points into make_
};

template <class Args>
struct Planner {
  Args args;
  auto operator()() const { return plan_as(args, Completeness::kLaunch); }
};
template <class Args, class Params>
struct OwnPlanner {
  Args args;
  OwnKernel<Params> own;
  auto operator()() const { return plan_as(args, own); }
};

}  // namespace

template <class MakePlan>
std::shared_ptr<const Plan::Call> Plan::Call::by(MakePlan make) {
  return std::make_shared<CallOf<Call, MakePlan>>(std::move(make));
}

Plan::Plan(std::shared_ptr<const Call> call) noexcept : call_(std::move(call)) {}

std::size_t Plan::workspace_size() const noexcept { return call_->workspace_size(); }
void Plan::launch(const LaunchOptions& options) const { call_->launch(options); }

Plan plan(const ForwardArgs& args) { return Plan(Plan::Call::by(Planner<ForwardArgs>{args})); }
Plan plan(const BackwardArgs& args) { return Plan(Plan::Call::by(Planner<BackwardArgs>{args})); }
Plan plan_own(const ForwardArgs& args, const ForwardEntry& entry, const void* user) {
  return Plan(Plan::Call::by(OwnPlanner<ForwardArgs, ForwardParams>{args, {entry, user}}));
}
Plan plan_own(const BackwardArgs& args, const BackwardEntry& entry, const void* user) {
  return Plan(Plan::Call::by(OwnPlanner<BackwardArgs, BackwardParams>{args, {entry, user}}));
}

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
