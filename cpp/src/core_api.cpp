#include "core_api.h"

#include "cpu_workspace.h"
#if FLASHSDK_HAVE_CUDA
#include "cuda/host/device.h"
#endif
#include "planned_call.h"
#include "profiler_range.h"

namespace flashsdk {
namespace {

template <class Args>
bool run(const Args& args, bool packed, const GpuOptions& gpu, Failure& failure) {
  try {
    auto planned = plan_call(args, packed);
    if (gpu.seed != nullptr) planned.params.score.dropout.state = gpu.seed(gpu.owner);
    LaunchOptions options;
    const bool on_gpu = args.q.device.type == DeviceType::kCUDA;
    if (on_gpu) {
      options.stream = gpu.current_stream != nullptr ? gpu.current_stream(gpu.owner) : gpu.stream;
      if (planned.workspace_size > 0)
        options.workspace = {gpu.workspace(gpu.owner, planned.workspace_size), planned.workspace_size};
    }
    if (gpu.at_launch != nullptr) gpu.at_launch(gpu.owner);
    on_gpu ? planned.launch(options) : launch_on_cpu(planned, options);
    return true;
  } catch (const Error& e) {
    failure = {to_string(e.code()), e.what()};
    return false;
  }
}

bool append(const KvAppendArgs& args, void* stream, Failure& failure) {
  try {
    kv_append(args, {{}, stream});
    return true;
  } catch (const Error& e) {
    failure = {to_string(e.code()), e.what()};
    return false;
  }
}

#if FLASHSDK_HAVE_CUDA
constexpr auto kSynchronize = cuda::synchronize;
#else
constexpr std::nullptr_t kSynchronize = nullptr;
#endif

}  // namespace

const CoreApi& core_api() noexcept {
  static constexpr CoreApi api{CoreApi::kLayout, run<ForwardArgs>, run<BackwardArgs>, append,      use_executor,
                               kSynchronize,     begin_range,      end_range,         measure_peak};
  return api;
}

}  // namespace flashsdk
