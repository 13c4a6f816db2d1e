// Which kernel a call takes, and why each faster one was refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cpu_features.h"
#include "flashsdk/flashsdk.h"
#include "kernel_registry.h"
#include "problem.h"
#include "table/cpu.h"
#include "validate.h"

namespace flashsdk::testing {
namespace {

std::size_t no_workspace(const ForwardParams&, int) { return 0; }
void no_launch(const ForwardParams&, const LaunchContext&) {}

ForwardEntry entry(const char* arch, int head_dim, Features features = Features::kNone, DType dtype = DType::kFloat32) {
  return {{Backend::kCpu, arch, dtype, head_dim, head_dim, MaskKind::kDense, features},
          {64, 64},
          nullptr,
          no_workspace,
          no_launch};
}
KernelRegistry registry_of(std::vector<ForwardEntry> entries, const std::string& forced_isa = "") {
  return KernelRegistry({std::move(entries), {}}, forced_isa);
}

ForwardParams problem(int head_dim, int head_dim_v, DType dtype = DType::kFloat32) {
  ForwardParams p;
  p.dtype = dtype;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim_v;
  return p;
}

using Reasons = std::vector<std::string>;
Reasons reasons(const Explanation& why) {
  Reasons result;
  for (const Explanation::Refusal& refusal : why.refused) result.push_back(refusal.reason);
  return result;
}

std::string message_of(const KernelRegistry& registry, const ForwardParams& p,
                       std::optional<Backend> forced = std::nullopt) {
  try {
    registry.select(p, forced);
  } catch (const Error& e) {
    return to_string(e.code()) + std::string(": ") + e.what();
  }
  return "";
}

TEST(KernelRegistry, TakesTheSmallestHeadDimThatFits) {
  const KernelRegistry registry = registry_of({entry("portable", 256), entry("portable", 64), entry("portable", 128)});
  EXPECT_EQ(registry.explain(problem(1, 1), {}).kernel, "cpu_portable_fp32_d64_dense_fwd");
  EXPECT_EQ(registry.explain(problem(64, 64), {}).kernel, "cpu_portable_fp32_d64_dense_fwd");
  EXPECT_EQ(registry.explain(problem(64, 65), {}).kernel, "cpu_portable_fp32_d128_dense_fwd");
  EXPECT_EQ(registry.explain(problem(129, 1), {}).kernel, "cpu_portable_fp32_d256_dense_fwd");
}

TEST(KernelRegistry, TakesFeaturesOnlyWhereTheyAreAskedFor) {
  const KernelRegistry registry = registry_of({entry("portable", 64, Features::kAll), entry("portable", 64)});
  ForwardParams p = problem(64, 64);
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d64_dense_fwd");
  p.score.softcap = 1;
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d64_dense_features_fwd");
}

TEST(KernelRegistry, HeadDimOfVCountsByItself) {
  ForwardEntry narrow_v = entry("portable", 192);
  narrow_v.key.head_dim_v = 128;
  const KernelRegistry registry = registry_of({entry("portable", 192), narrow_v});
  EXPECT_EQ(registry.explain(problem(192, 128), {}).kernel, "cpu_portable_fp32_d192x128_dense_fwd");
  EXPECT_EQ(registry.explain(problem(64, 64), {}).kernel, "cpu_portable_fp32_d192x128_dense_fwd");
  EXPECT_EQ(registry.explain(problem(192, 129), {}).kernel, "cpu_portable_fp32_d192_dense_fwd");
  EXPECT_EQ(registry.explain(problem(128, 192), {}).kernel, "cpu_portable_fp32_d192_dense_fwd");
}

TEST(KernelRegistry, FewerFeaturesAndAlignedTensorsComeFirst) {
  ForwardEntry any_alignment = entry("portable", 64, Features::kAll);
  any_alignment.key.any_alignment = true;
  const KernelRegistry registry =
      registry_of({any_alignment, entry("portable", 64, Features::kAll), entry("portable", 64, Features::kCapped),
                   entry("portable", 64, Features::kBias), entry("portable", 64)});
  ForwardParams p = problem(64, 64);
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d64_dense_fwd");
  const float bias = 0;
  p.score.bias.ptr = &bias;
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d64_dense_bias_fwd");
  // Entries say themselves what they do not take; here each but the last refuses.
  std::vector<ForwardEntry> picky{any_alignment, entry("portable", 64, Features::kAll),
                                  entry("portable", 64, Features::kCapped), entry("portable", 64, Features::kBias)};
  for (ForwardEntry& e : picky) e.can_implement = [](const ForwardParams&) { return "no"; };
  picky[0].can_implement = nullptr;
  const Explanation why = registry_of(picky).explain(p, {});
  EXPECT_EQ(why.kernel, "cpu_portable_fp32_d64_dense_features_unaligned_fwd");
  std::vector<std::string> refused;
  for (const Explanation::Refusal& refusal : why.refused) refused.push_back(refusal.kernel);
  EXPECT_EQ(refused, (std::vector<std::string>{"cpu_portable_fp32_d64_dense_bias_fwd",
                                               "cpu_portable_fp32_d64_dense_softcap_dropout_fwd",
                                               "cpu_portable_fp32_d64_dense_features_fwd"}));
}

TEST(KernelRegistry, KernelsThatSplitKeysAreAskedFirst) {
  ForwardEntry split = entry("portable", 256);
  split.key.splits_keys = true;
  split.can_implement = [](const ForwardParams& p) { return p.seqlen_q == 1 ? nullptr : "too many queries"; };
  const KernelRegistry registry = registry_of({entry("portable", 64), split});
  ForwardParams p = problem(64, 64);
  p.seqlen_q = 1;
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d256_dense_split_fwd");
  p.seqlen_q = 2;
  const Explanation why = registry.explain(p, {});
  EXPECT_EQ(why.kernel, "cpu_portable_fp32_d64_dense_fwd");
  EXPECT_EQ(reasons(why), Reasons{"too many queries"});
}

TEST(KernelRegistry, TheFirstKernelThatSplitsKeysSpeaksForAll) {
  ForwardEntry small = entry("portable", 64), large = entry("portable", 128);
  small.key.splits_keys = large.key.splits_keys = true;
  small.can_implement = [](const ForwardParams&) { return "too few keys"; };
  const KernelRegistry registry = registry_of({entry("portable", 256), small, large});
  const Explanation why = registry.explain(problem(64, 64), {});
  EXPECT_EQ(why.kernel, "cpu_portable_fp32_d256_dense_fwd");
  EXPECT_EQ(reasons(why), Reasons{"too few keys"});
  EXPECT_EQ(registry.explain(problem(65, 65), {}).kernel, "cpu_portable_fp32_d128_dense_split_fwd");
}

TEST(KernelRegistry, FasterInstructionSetsComeFirstWhereTheProcessorHasThem) {
  const std::vector<ForwardEntry> entries{entry("no_such_isa", 64), entry("avx2", 64), entry("portable", 64)};
  const KernelRegistry registry = registry_of(entries);
  const Explanation why = registry.explain(problem(64, 64), {});
  EXPECT_EQ(why.kernel, cpu_supports("avx2") ? "cpu_avx2_fp32_d64_dense_fwd" : "cpu_portable_fp32_d64_dense_fwd");
  ASSERT_FALSE(why.refused.empty());
  EXPECT_EQ(why.refused[0].kernel, "cpu_no_such_isa_fp32_d64_dense_fwd");
  EXPECT_EQ(why.refused[0].reason, "this processor has no no_such_isa");
  EXPECT_EQ(registry.cpu_isas(), (std::vector<std::string>{"portable", "avx2"}));
}

TEST(KernelRegistry, AForcedInstructionSetRefusesFasterOnes) {
  const KernelRegistry registry = registry_of({entry("avx2", 64), entry("portable", 64)}, "portable");
  const Explanation why = registry.explain(problem(64, 64), {});
  EXPECT_EQ(why.kernel, "cpu_portable_fp32_d64_dense_fwd");
  EXPECT_EQ(reasons(why), Reasons{"FLASHSDK_CPU_ISA=portable"});
  EXPECT_EQ(registry.cpu_isa(), "portable");
}

TEST(KernelRegistry, AnUnknownForcedInstructionSetIsAnErrorOfEveryCpuCall) {
  const KernelRegistry unknown = registry_of({entry("portable", 64)}, "sse9");
  const KernelRegistry missing = registry_of({entry("portable", 64)}, "avx2");
  EXPECT_EQ(message_of(unknown, problem(64, 64)), "invalid_argument: FLASHSDK_CPU_ISA: sse9; portable");
  EXPECT_EQ(message_of(missing, problem(64, 64)), "unsupported: FLASHSDK_CPU_ISA: avx2 is not in this build; portable");
  EXPECT_THROW(unknown.cpu_isa(), Error);
}

TEST(KernelRegistry, AKernelMaySayNo) {
  ForwardEntry picky = entry("portable", 64);
  picky.can_implement = [](const ForwardParams& p) { return p.seqlen_q % 2 == 0 ? nullptr : "seqlen_q is odd"; };
  const KernelRegistry registry = registry_of({picky, entry("portable", 128)});
  ForwardParams p = problem(64, 64);
  p.seqlen_q = 4;
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_fp32_d64_dense_fwd");
  p.seqlen_q = 5;
  const Explanation why = registry.explain(p, {});
  EXPECT_EQ(why.kernel, "cpu_portable_fp32_d128_dense_fwd");
  EXPECT_EQ(reasons(why), Reasons{"seqlen_q is odd"});
}

TEST(KernelRegistry, NoKernelIsOneLine) {
  const KernelRegistry registry = registry_of({entry("portable", 64)});
  EXPECT_EQ(
      message_of(registry, problem(65, 64)),
      "unsupported: mha_fwd: no kernel for float32, head_dim 65, dense mask on cpu; what flashsdk.kernels() lists");
  EXPECT_EQ(
      message_of(registry, problem(64, 64, DType::kBFloat16)),
      "unsupported: mha_fwd: no kernel for bfloat16, head_dim 64, dense mask on cpu; what flashsdk.kernels() lists");
  BackwardParams backward;
  backward.head_dim = backward.head_dim_v = 64;
  EXPECT_EQ(registry.explain(backward, {}).kernel, "");
}

TEST(KernelRegistry, ABackendThatWasAskedForSaysWhyItRefuses) {
  ForwardEntry sm90 = entry("sm_90a", 128, Features::kAll, DType::kBFloat16),
               sm80 = entry("sm_80", 256, Features::kAll, DType::kBFloat16);
  sm90.key.backend = Backend::kSm90;
  sm80.key.backend = Backend::kSm80;
  sm90.can_implement = [](const ForwardParams&) { return "bias"; };
  const KernelRegistry registry = registry_of({sm90, sm80});
  ForwardParams p = problem(64, 64, DType::kBFloat16);
  p.device = {DeviceType::kCUDA, 0};
  EXPECT_EQ(message_of(registry, p), "");
  EXPECT_EQ(message_of(registry, p, Backend::kSm80), "");
  EXPECT_EQ(message_of(registry, p, Backend::kSm90),
            "unsupported: mha_fwd: no sm90 kernel for bfloat16, head_dim 64, dense mask on cuda:0; what "
            "flashsdk.kernels() lists (sm90_bf16_d128_dense_features_64x64_fwd: bias)");
  p.head_dim = 200;
  EXPECT_EQ(message_of(registry, p, Backend::kSm90),
            "unsupported: mha_fwd: no sm90 kernel for bfloat16, head_dim 200, dense mask on cuda:0; what "
            "flashsdk.kernels() lists");
}

TEST(KernelRegistry, ShortSequencesTakeTheSmallerTilesOfSm80) {
  std::vector<ForwardEntry> forward;
  std::vector<BackwardEntry> backward;
  for (const Backend backend : {Backend::kSm90, Backend::kSm80})
    for (const int head_dim : {64, 128, 256}) {
      const KernelKey key{backend,          backend == Backend::kSm90 ? "sm_90a" : "sm_80",
                          DType::kBFloat16, head_dim,
                          head_dim,         MaskKind::kDense,
                          Features::kNone};
      forward.push_back({key, {64, 64}, nullptr, nullptr, nullptr});
      backward.push_back({key, {64, 64}, nullptr, nullptr, nullptr});
    }
  const KernelRegistry registry({forward, backward}, ""), sm90_alone({{forward[0]}, {backward[0]}}, "");
  const auto backend_of = [](const KernelRegistry& kernels, auto params, int head_dim, int seqlen_q, int seqlen_k,
                             std::optional<Backend> forced = std::nullopt) {
    params.dtype = params.dtype_kv = DType::kBFloat16;
    params.device = {DeviceType::kCUDA, 0};
    params.head_dim = params.head_dim_v = head_dim;
    params.seqlen_q = seqlen_q;
    params.seqlen_k = seqlen_k;
    return kernels.explain(params, forced).kernel.substr(0, 4);
  };
  const ForwardParams fwd;
  const BackwardParams bwd;
  EXPECT_EQ(backend_of(registry, fwd, 64, 1, 1), "sm90");
  EXPECT_EQ(backend_of(registry, fwd, 128, 32, 32), "sm80");
  EXPECT_EQ(backend_of(registry, fwd, 128, 33, 32), "sm90");
  EXPECT_EQ(backend_of(registry, fwd, 128, 32, 33), "sm90");
  EXPECT_EQ(backend_of(registry, fwd, 256, 32, 32), "sm80");
  EXPECT_EQ(backend_of(registry, fwd, 256, 33, 33), "sm90");
  EXPECT_EQ(backend_of(registry, bwd, 64, 64, 64), "sm80");
  EXPECT_EQ(backend_of(registry, bwd, 64, 64, 65), "sm90");
  EXPECT_EQ(backend_of(registry, bwd, 128, 8, 8), "sm90");
  EXPECT_EQ(backend_of(registry, bwd, 64, 8, 8, Backend::kSm90), "sm90");  // as asked
  EXPECT_EQ(backend_of(sm90_alone, bwd, 64, 8, 8), "sm90");                // as there is no other

  ForwardParams p = problem(128, 128, DType::kBFloat16);
  p.device = {DeviceType::kCUDA, 0};
  p.seqlen_q = p.seqlen_k = 8;
  EXPECT_EQ(reasons(registry.explain(p, {})), Reasons{"sm80 is faster for sequences so short"});  // once
  EXPECT_EQ(reasons(KernelRegistry({{forward[1]}, {}}, "").explain(p, {})), Reasons{});           // sm90 took it
}

TEST(KernelRegistry, Fp8KeysHaveKernelsOfTheirOwnOnAGpu) {
  const auto gpu_entry = [](Backend backend, int head_dim, bool fp8_kv, bool splits_keys = false) {
    ForwardEntry e = entry(backend == Backend::kSm90 ? "sm_90a" : "sm_80", head_dim, Features::kNone, DType::kBFloat16);
    e.key.backend = backend;
    e.key.fp8_kv = fp8_kv;
    e.key.splits_keys = splits_keys;
    return e;
  };
  ForwardEntry fp8_split = gpu_entry(Backend::kSm80, 64, true, true);
  fp8_split.can_implement = [](const ForwardParams& p) { return p.seqlen_q == 1 ? nullptr : "too many queries"; };
  const KernelRegistry registry =
      registry_of({gpu_entry(Backend::kSm90, 64, false), gpu_entry(Backend::kSm90, 128, false),
                   gpu_entry(Backend::kSm80, 64, false, true), gpu_entry(Backend::kSm80, 64, false), fp8_split,
                   gpu_entry(Backend::kSm80, 64, true), gpu_entry(Backend::kSm80, 128, false),
                   entry("portable", 128, Features::kNone, DType::kBFloat16)});
  ForwardParams p = problem(64, 64, DType::kBFloat16);
  p.device = {DeviceType::kCUDA, 0};
  p.seqlen_q = 1;
  Explanation why = registry.explain(p, {});
  EXPECT_EQ(why.kernel, "sm80_bf16_d64_dense_split_64x64_fwd");  // the first that splits is that of 16 bits
  EXPECT_TRUE(why.refused.empty());
  p.dtype_kv = DType::kFloat8E4M3;
  why = registry.explain(p, {});
  EXPECT_EQ(why.kernel, "sm80_bf16_fp8kv_d64_dense_split_64x64_fwd");
  EXPECT_TRUE(why.refused.empty());
  p.seqlen_q = 2;
  why = registry.explain(p, {});
  EXPECT_EQ(why.kernel, "sm80_bf16_fp8kv_d64_dense_64x64_fwd");
  EXPECT_EQ(reasons(why), (Reasons{"too many queries", "k and v are float8_e4m3fn", "k and v are float8_e4m3fn"}));
  EXPECT_EQ(message_of(registry, p, Backend::kSm90),
            "unsupported: mha_fwd: no sm90 kernel for bfloat16 with float8_e4m3fn k and v, head_dim 64, dense mask on "
            "cuda:0; what flashsdk.kernels() lists (sm90_bf16_d64_dense_64x64_fwd: k and v are float8_e4m3fn)");
  p.device = {DeviceType::kCPU, 0};  // whose kernels take both
  EXPECT_EQ(registry.explain(p, {}).kernel, "cpu_portable_bf16_d128_dense_fwd");
}

TEST(KernelRegistry, EveryReasonOfABackendIsToldOnce) {
  auto gpu_entry = [](Backend backend, int head_dim, const char* (*can_implement)(const ForwardParams&)) {
    ForwardEntry e = entry(backend == Backend::kSm90 ? "sm_90a" : "sm_80", head_dim, Features::kAll, DType::kBFloat16);
    e.key.backend = backend;
    e.can_implement = can_implement;
    return e;
  };
  auto no_bias = [](const ForwardParams&) { return "a bias is not compiled in"; };
  auto other_type = [](const ForwardParams&) { return "a bias is of another type"; };
  auto unaligned = [](const ForwardParams&) { return "unaligned"; };
  ForwardEntry split = gpu_entry(Backend::kSm80, 64, [](const ForwardParams&) { return "too few keys"; });
  split.key.splits_keys = true;
  const KernelRegistry registry =
      registry_of({gpu_entry(Backend::kSm90, 64, no_bias), gpu_entry(Backend::kSm90, 64, other_type),
                   gpu_entry(Backend::kSm90, 128, no_bias), split, gpu_entry(Backend::kSm80, 64, unaligned)});
  ForwardParams p = problem(64, 64, DType::kBFloat16);
  p.device = {DeviceType::kCUDA, 0};
  p.score.softcap = 1;
  const std::string lists = "dense mask, score features on cuda:0; what flashsdk.kernels() lists ";
  EXPECT_EQ(message_of(registry, p, Backend::kSm90),
            "unsupported: mha_fwd: no sm90 kernel for bfloat16, head_dim 64, " + lists +
                "(sm90_bf16_d64_dense_features_64x64_fwd: a bias is not compiled in; "
                "sm90_bf16_d64_dense_features_64x64_fwd: a bias is of another type)");
  // Splitting is for speed, and where no backend is asked for the last one takes the most.
  const std::string by_sm80 = lists + "(sm80_bf16_d64_dense_features_64x64_fwd: unaligned)";
  EXPECT_EQ(message_of(registry, p, Backend::kSm80),
            "unsupported: mha_fwd: no sm80 kernel for bfloat16, head_dim 64, " + by_sm80);
  EXPECT_EQ(message_of(registry, p), "unsupported: mha_fwd: no kernel for bfloat16, head_dim 64, " + by_sm80);
}

// ---- what this build has

TEST(Registry, ListsEveryKernelOnceUnderItsName) {
  const std::vector<KernelInfo> all = kernels();
  std::set<std::string> names;
  for (const KernelInfo& k : all) {
    EXPECT_TRUE(names.insert(k.name).second) << k.name << " is there twice";
    EXPECT_TRUE(k.op == "fwd" || k.op == "bwd") << k.name;
    EXPECT_NE(k.name.find("_d" + std::to_string(k.head_dim)), std::string::npos) << k.name;
    EXPECT_NE(k.name.find("_" + k.mask + "_"), std::string::npos) << k.name;
    EXPECT_EQ(k.name.find("_features_") != std::string::npos, k.features.size() == 4) << k.name;
    for (const std::string& feature : k.features) {
      EXPECT_TRUE(k.features.size() == 4 || k.name.find("_" + feature + "_") != std::string::npos) << k.name;
    }
    EXPECT_EQ(k.name.find("_split_") != std::string::npos, k.splits_keys) << k.name;
    EXPECT_EQ(k.name.find("_fp8kv_") != std::string::npos, k.fp8_kv) << k.name;
    EXPECT_EQ(k.name.substr(k.name.size() - 4), "_" + k.op) << k.name;
    EXPECT_TRUE(k.tile_m > 0 && k.tile_n > 0) << k.name;
    if (k.backend == "cpu") {
      EXPECT_EQ(k.name.rfind("cpu_" + k.arch + "_", 0), 0u) << k.name;
    }
  }
}

TEST(Registry, TheCpuImplementsEveryCombination) {
  const std::vector<KernelInfo> all = kernels();
  for (const char* op : {"fwd", "bwd"}) {
    for (const char* dtype : {"float32", "float16", "bfloat16"}) {
      for (const char* mask : {"dense", "band", "block_sparse"}) {
        for (bool features : {false, true}) {
          for (int head_dim : {256, table::widest(table::kCpuHeadDims)}) {
            const bool compiled_in = table::cpu_has(head_dim, Features::kNone) ? features : true;
            EXPECT_TRUE(std::any_of(all.begin(), all.end(),
                                    [&](const KernelInfo& k) {
                                      return k.backend == "cpu" && k.available && k.op == op && k.dtype == dtype &&
                                             k.mask == mask && k.features.empty() != compiled_in &&
                                             k.head_dim == head_dim;
                                    }))
                << op << " " << dtype << " " << mask << " " << head_dim << (features ? " with features" : "");
          }
        }
      }
    }
  }
}

TEST(Registry, BuildInfo) {
  const BuildInfo info = build_info();
  EXPECT_EQ(info.version, FLASHSDK_VERSION);
  EXPECT_FALSE(info.compiler.empty());
  ASSERT_FALSE(info.cpu_isas.empty());
  EXPECT_NE(std::find(info.cpu_isas.begin(), info.cpu_isas.end(), info.cpu_isa), info.cpu_isas.end());
  EXPECT_TRUE(cpu_supports(info.cpu_isa));
  EXPECT_EQ(info.cpu_head_dim, table::widest(table::kCpuHeadDims));
}

TEST(Registry, ExplainNamesTheKernelOfACall) {
  Problem p({.seqlen_q = 10, .seqlen_k = 10, .head_dim = 40, .head_dim_v = 40}, DType::kBFloat16);
  p.options.mask = Causal();
  const std::vector<KernelInfo> all = kernels();
  for (const Explanation& why : {explain(p.forward_args()), explain(p.backward_args())}) {
    const auto info = std::find_if(all.begin(), all.end(), [&](const KernelInfo& k) { return k.name == why.kernel; });
    ASSERT_NE(info, all.end()) << why.kernel;
    EXPECT_TRUE(info->available);
    EXPECT_EQ(info->dtype, "bfloat16");
    EXPECT_EQ(info->mask, "band");
    EXPECT_TRUE(info->features.empty());
    EXPECT_GE(info->head_dim, 40);
    EXPECT_EQ(std::make_pair(why.tile_m, why.tile_n), std::make_pair(info->tile_m, info->tile_n));
  }
}

TEST(Registry, AQuestionTakesOutputsThatAreNotThereYetForRowMajor) {
  const Problem p(
      {.batch = 2, .seqlen_q = 10, .seqlen_k = 12, .num_heads = 2, .num_heads_kv = 2, .head_dim = 40, .head_dim_v = 48},
      DType::kBFloat16);
  BackwardArgs given = p.backward_args(), asked = given;
  asked.out = asked.dout = asked.dq = asked.dk = asked.dv = TensorView();
  const BackwardParams a = validate(given, Completeness::kLaunch), b = validate(asked, Completeness::kQuery);
  using Rows = TensorParam BackwardParams::*;
  for (const Rows tensor : {Rows(&BackwardParams::out), &BackwardParams::dout, &BackwardParams::dq, &BackwardParams::dk,
                            &BackwardParams::dv}) {
    EXPECT_EQ((a.*tensor).batch, (b.*tensor).batch);
    EXPECT_EQ((a.*tensor).row, (b.*tensor).row);
    EXPECT_EQ((a.*tensor).head, (b.*tensor).head);
  }
}

TEST(Registry, ABandThatHidesNothingTakesTheDenseKernel) {
  Problem p({.seqlen_q = 10, .seqlen_k = 20});
  p.options.mask = SlidingWindow(19, 9);
  EXPECT_NE(explain(p.forward_args()).kernel.find("_dense_"), std::string::npos);
  p.options.mask = SlidingWindow(18, 9);
  EXPECT_NE(explain(p.forward_args()).kernel.find("_band_"), std::string::npos);
}

// The environment is read once per process: in a process of its own, which must not have asked before.
#define FLASHSDK_PROBE(isa) #isa,
constexpr const char* kBuiltIsas[] = {FLASHSDK_TEST_ISAS};  // slowest first
#undef FLASHSDK_PROBE

[[noreturn]] void print_isa_and_exit(const char* forced) {
  setenv("FLASHSDK_CPU_ISA", forced, 1);
  int code = 0;
  try {
    const Problem p({.seqlen_q = 4, .seqlen_k = 4});
    std::fprintf(stderr, "%s runs %s\n", build_info().cpu_isa.c_str(), explain(p.forward_args()).kernel.c_str());
  } catch (const Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    code = 1;
  }
  std::_Exit(code);
}

// ctest says which it must be where an emulator plays a processor.
TEST(Registry, EachDTypeTakesTheFastestInstructionSetOfThisProcessor) {
  const std::pair<DType, std::string> dtypes[] = {
      {DType::kFloat32, "fp32"}, {DType::kBFloat16, "bf16"}, {DType::kFloat16, "fp16"}};
  for (const auto& [dtype, name] : dtypes) {
    std::string fastest;
    for (const char* isa : kBuiltIsas)
      if (cpu_prefers(isa) && table::cpu_has(isa, dtype)) fastest = isa;
    const Problem p({.seqlen_q = 4, .seqlen_k = 4}, dtype);
    const std::string kernel = explain(p.forward_args()).kernel;
    EXPECT_EQ(kernel.find("cpu_" + fastest + "_" + name + "_d"), 0u) << kernel << " on " << fastest;
  }
  if (const char* expected = std::getenv("FLASHSDK_TEST_EXPECTED_ISA")) {
    EXPECT_EQ(build_info().cpu_isa, expected);
  }
}

TEST(RegistryDeathTest, TheEnvironmentForcesAnInstructionSet) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string slowest = kBuiltIsas[0];
  EXPECT_EXIT(print_isa_and_exit(kBuiltIsas[0]), ::testing::ExitedWithCode(0),
              "^" + slowest + " runs cpu_" + slowest + "_fp32_d");
  EXPECT_EXIT(print_isa_and_exit("z80"), ::testing::ExitedWithCode(1), "^FLASHSDK_CPU_ISA: z80; " + slowest);
}

}  // namespace
}  // namespace flashsdk::testing
