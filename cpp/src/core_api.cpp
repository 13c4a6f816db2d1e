#include "core_api.h"

#include "cpu_workspace.h"
#include "planned_call.h"

namespace flashsdk {
namespace {

template <class Args>
bool run(const Args& args, bool packed, const GpuOptions& gpu, Failure& failure) {
  try {
    auto planned = plan_call(args, packed);
    if (gpu.seed != nullptr) planned.params.score.dropout.state = gpu.seed(gpu.owner);
    LaunchOptions options;
    if (args.q.device.type == DeviceType::kCUDA) {
      options.stream = gpu.stream;
      if (planned.workspace_size > 0)
        options.workspace = {gpu.workspace(gpu.owner, planned.workspace_size), planned.workspace_size};
      planned.launch(options);
    } else {
      launch_on_cpu(planned, options);
    }
    return true;
  } catch (const Error& e) {
    failure = {to_string(e.code()), e.what()};
    return false;
  }
}

}  // namespace

const CoreApi& core_api() noexcept {
  static constexpr CoreApi api{CoreApi::kLayout, run<ForwardArgs>, run<BackwardArgs>, use_executor};
  return api;
}

}  // namespace flashsdk
