// Compiled with -fno-exceptions and -fno-rtti: no header may throw in a function of its own.
#include <flashsdk/flashsdk.h>

#include <cstdlib>
#include <memory>
#include <vector>

#define PLUGIN_API extern "C" __attribute__((visibility("default")))

// An address in the library's code, wherever that is linked.
PLUGIN_API void* code() { return reinterpret_cast<void*>(&flashsdk::size_of); }

// 0 where attention over equal values gives that value.
PLUGIN_API int attend() {
  constexpr std::int64_t kSeqlen = 600, kHeads = 4, kHeadDim = 32;
  std::vector<float> q(kSeqlen * kHeads * kHeadDim, 1.f), out(q.size()), lse(kHeads * kSeqlen);
  const auto rows = [](std::vector<float>& x) {
    return flashsdk::TensorView(x.data(), flashsdk::DType::kFloat32, {1, kSeqlen, kHeads, kHeadDim});
  };
  flashsdk::ForwardArgs args;
  args.q = args.k = args.v = rows(q);
  args.out = rows(out);
  args.lse = flashsdk::TensorView(lse.data(), flashsdk::DType::kFloat32, {1, kHeads, kSeqlen});
  const flashsdk::Plan plan = flashsdk::plan(args);
  const std::unique_ptr<void, decltype(&std::free)> workspace(
      std::aligned_alloc(256, (plan.workspace_size() + 256) / 256 * 256), &std::free);
  plan.launch({{workspace.get(), plan.workspace_size()}});
  for (const float x : out)
    if (x < 0.999f || x > 1.001f) return 1;
  return 0;
}
