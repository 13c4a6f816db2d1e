#include "kernel_registry.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "check.h"
#include "cpu_features.h"
#include "table/choose.h"
#if FLASHSDK_HAVE_CUDA
#include "cuda/host/device.h"
#endif

namespace flashsdk {
namespace {

template <class Params>
constexpr const char* kOp = std::is_same_v<Params, ForwardParams> ? "fwd" : "bwd";

const char* name_of(Backend backend) {
  switch (backend) {
    case Backend::kCpu:
      return "cpu";
    case Backend::kSm80:
      return "sm80";
    case Backend::kSm90:
      return "sm90";
  }
  return "unknown";
}

const char* name_of(MaskKind mask) {
  switch (mask) {
    case MaskKind::kDense:
      return "dense";
    case MaskKind::kBand:
      return "band";
    case MaskKind::kBlockSparse:
      return "block_sparse";
  }
  return "unknown";
}

const char* short_name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat16:
      return "fp16";
    case DType::kBFloat16:
      return "bf16";
    default:
      return to_string(dtype);
  }
}

std::vector<std::string> words_of(Features features) {
  std::vector<std::string> words;
  if (has_softcap(features)) words.emplace_back("softcap");
  if (has_bias(features)) words.emplace_back("bias");
  if (has_alibi(features)) words.emplace_back("alibi");
  if (has_dropout(features)) words.emplace_back("dropout");
  return words;
}

// "cpu_avx2_bf16_d128_band_fwd", "sm90_bf16_d192x128_dense_softcap_dropout_128x128_fwd",
// "sm80_bf16_d64_dense_features_split_64x128_fwd", "sm80_fp16_fp8kv_d128_band_split_16x128_fwd": no two kernels of a
// build have the same.
std::string name_of(const KernelKey& key, Tile tile, const char* op) {
  std::string name = name_of(key.backend);
  const auto add = [&](const std::string& word) { (name += '_') += word; };
  if (key.backend == Backend::kCpu) add(key.arch);
  add(short_name_of(key.dtype));
  if (key.fp8_kv) add("fp8kv");
  std::string dims = "d";
  dims += std::to_string(key.head_dim);
  if (key.head_dim_v != key.head_dim) (dims += 'x') += std::to_string(key.head_dim_v);
  add(dims);
  add(name_of(key.mask));
  if (key.features == Features::kAll)
    add("features");
  else
    for (const std::string& word : words_of(key.features)) add(word);
  if (key.any_alignment) add("unaligned");
  if (key.splits_keys) add("split");
  if (key.backend != Backend::kCpu) add(std::to_string(tile.m) + "x" + std::to_string(tile.n));
  add(op);
  return name;
}

// Its place among the known instruction sets, slowest first; behind all of them for an unknown one.
std::ptrdiff_t isa_rank(const std::string& isa) {
  const std::vector<std::string>& known = known_cpu_isas();
  return std::find(known.begin(), known.end(), isa) - known.begin();
}

// Why a kernel that runs here is passed over all the same.
const char* preference_refusal(const KernelKey& key, const std::string& forced_isa) {
  if (key.backend != Backend::kCpu || !forced_isa.empty() || cpu_prefers(key.arch)) return nullptr;
  return "slower than the next on this processor; FLASHSDK_CPU_ISA takes it";
}

std::string machine_refusal(const KernelKey& key, const std::string& forced_isa) {
  if (key.backend != Backend::kCpu) return {};
  // An instruction set that adds nothing for a dtype has no kernels for it: slower ones take its place.
  if (!forced_isa.empty() && isa_rank(key.arch) > isa_rank(forced_isa)) return "FLASHSDK_CPU_ISA=" + forced_isa;
  if (!cpu_supports(key.arch)) return std::string("this processor has no ") + key.arch;
  return {};
}

// Whether a kernel for GPUs runs on one of this machine. Listings alone ask: a call knows its device, and a process
// that calls only the CPU should not start the driver.
bool gpu_available([[maybe_unused]] const KernelKey& key) {
#if FLASHSDK_HAVE_CUDA
  return cuda::machine_refusal(key.arch).empty();
#else
  return false;
#endif
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The forced one, or the fastest that was built and runs here.
std::string isa_in_use(const std::vector<std::string>& built, const std::string& forced) {
  std::vector<std::string> usable;
  std::copy_if(built.begin(), built.end(), std::back_inserter(usable), cpu_supports);
  if (forced.empty()) {
    const auto best = std::find_if(usable.rbegin(), usable.rend(), cpu_prefers);
    return best == usable.rend() ? "" : *best;
  }
  if (!contains(known_cpu_isas(), forced)) fail("FLASHSDK_CPU_ISA", shown(forced), joined(usable));
  if (!contains(built, forced))
    fail("FLASHSDK_CPU_ISA", forced + " is not in this build", joined(usable), ErrorCode::kUnsupported);
  if (!contains(usable, forced))
    fail("FLASHSDK_CPU_ISA", "this processor has no " + forced, joined(usable), ErrorCode::kUnsupported);
  return forced;
}

}  // namespace

template <class Params>
KernelRegistry::Rows<Params>::Rows(const std::vector<KernelEntry<Params>>& entries, const std::string& forced_isa) {
  std::vector<std::string> archs;  // in order of appearance
  for (const KernelEntry<Params>& entry : entries) {
    const auto arch = std::find(archs.begin(), archs.end(), entry.key.arch);
    const auto rank = static_cast<int>(arch - archs.begin());
    if (arch == archs.end()) archs.emplace_back(entry.key.arch);
    all.push_back({entry, rank, all.size(), name_of(entry.key, entry.tile, kOp<Params>),
                   machine_refusal(entry.key, forced_isa), preference_refusal(entry.key, forced_isa)});
  }
  std::sort(all.begin(), all.end(), [](const Row<Params>& a, const Row<Params>& b) {
    return table::Listed(a.key(), a.arch_rank, a.position) < table::Listed(b.key(), b.arch_rank, b.position);
  });
  for (const Row<Params>& row : all)
    for (const bool featured : {false, true}) {
      const KernelKey& key = row.key();
      if (table::competes(key, key.dtype, key.mask, featured)) bucket(key.dtype, key.mask, featured).push_back(&row);
    }
  for (Bucket& competing : buckets)
    std::sort(competing.begin(), competing.end(), [](const Row<Params>* a, const Row<Params>* b) {
      return table::Asked(a->key(), a->arch_rank, a->position) < table::Asked(b->key(), b->arch_rank, b->position);
    });
}

KernelRegistry::KernelRegistry(const KernelEntries& entries, const std::string& forced_isa)
    : forward_(entries.forward, forced_isa), backward_(entries.backward, forced_isa) {
  try {
    cpu_isa_ = isa_in_use(cpu_isas(), forced_isa);
  } catch (const Error& e) {
    isa_error_ = e;
  }
}

const KernelRegistry& KernelRegistry::instance() {
  static const KernelRegistry registry = [] {
    struct Collector final : KernelTable {
      KernelEntries entries;
      void add(const ForwardEntry& entry) override { entries.forward.push_back(entry); }
      void add(const BackwardEntry& entry) override { entries.backward.push_back(entry); }
    } collector;
    add_all_kernels(collector);
    const char* forced = std::getenv("FLASHSDK_CPU_ISA");
    return KernelRegistry(collector.entries, forced != nullptr ? forced : "");
  }();
  return registry;
}

template <class Params, class Refuse>
const KernelRegistry::Row<Params>* KernelRegistry::search(const Params& p, std::optional<Backend> forced,
                                                          Refuse refuse) const {
  const table::Call call = table::call_of(p);
  int refused_arch = -1;
  const bool is_short = !forced && table::is_short_for_sm90(call);
  const Row<Params>* passed_over = nullptr;  // of sm90, which takes the call where no other does
  const auto& competing = rows<Params>().bucket(call.dtype, call.mask, call.features != Features::kNone);
  const Row<Params>* taken = table::choose(competing, call, [&](const Row<Params>& row) {
    const char* refusal = nullptr;
    if (!row.available()) {
      refusal = row.machine_refusal.c_str();
    } else if (forced && *forced != row.key().backend) {
      refusal = "the call asks for another backend";
    } else if (table::has_other_keys(row.key(), call)) {
      refusal = "k and v are float8_e4m3fn";
    } else {
      refusal = row.preference_refusal;
    }
    if (refusal != nullptr) {
      // The first of an architecture speaks for all: it is the one that would have been taken.
      if (row.arch_rank == refused_arch) return false;
      refused_arch = row.arch_rank;
      refuse(row, refusal);
      return false;
    }
    const char* reason = row.entry.can_implement == nullptr ? nullptr : row.entry.can_implement(p);
    if (reason == nullptr && is_short && row.key().backend == Backend::kSm90) {
      if (passed_over != nullptr) return false;
      passed_over = &row;
      reason = "sm80 is faster for sequences so short";
    }
    if (reason != nullptr) refuse(row, reason);
    return reason == nullptr;
  });
  return taken != nullptr ? taken : passed_over;
}

void KernelRegistry::check_isa(Device device) const {
  if (isa_error_ && device.type == DeviceType::kCPU) throw *isa_error_;
}

template <class Params>
const KernelEntry<Params>& KernelRegistry::select(const Params& p, std::optional<Backend> forced) const {
  check_isa(p.device);
  const Row<Params>* taken = search(p, forced, [](const Row<Params>&, const char*) {});
  if (taken != nullptr) return taken->entry;
  std::string problem = std::string(to_string(p.dtype)) + (p.fp8_kv() ? " with float8_e4m3fn k and v" : "") +
                        ", head_dim " + std::to_string(std::max(p.head_dim, p.head_dim_v)) + ", " +
                        name_of(p.mask.kind) + " mask" + (p.score.any_feature() ? ", score features" : "") + " on " +
                        to_string(p.device);
  // Each reason once, as any may be the one that a caller can change: where a kernel has no bias compiled in, the next
  // may have one and refuse its type. Of the backend that was asked for, else of the last one, which takes the most.
  // Kernels that split keys are passed over: their reason says that it would not pay.
  std::vector<std::pair<const Row<Params>*, std::string>> refused;
  search(p, forced, [&](const Row<Params>& row, const char* reason) {
    const KernelKey& key = row.entry.key;
    if (key.splits_keys || (forced && *forced != key.backend)) return;
    if (!refused.empty() && refused.back().first->entry.key.backend != key.backend) refused.clear();
    const auto same = [&](const auto& said) { return said.second == reason; };
    if (std::none_of(refused.begin(), refused.end(), same)) refused.emplace_back(&row, reason);
  });
  std::string allowed;
  for (const auto& [row, reason] : refused) allowed += (allowed.empty() ? "" : "; ") + row->name + ": " + reason;
  allowed = "what flashsdk.kernels() lists" + (allowed.empty() ? "" : " (" + allowed + ")");
  const std::string none = forced ? std::string("no ") + name_of(*forced) + " kernel for " : "no kernel for ";
  fail(std::string("mha_") + kOp<Params>, none + problem, allowed, ErrorCode::kUnsupported);
}

template <class Params>
Explanation KernelRegistry::explain(const Params& p, std::optional<Backend> forced) const {
  check_isa(p.device);
  Explanation result;
  const Row<Params>* row = search(p, forced, [&](const Row<Params>& refused, const char* reason) {
    result.refused.push_back({refused.name, reason});
  });
  if (row == nullptr) return result;
  std::erase_if(result.refused, [&](const auto& refusal) { return refusal.kernel == row->name; });  // passed over first
  result.kernel = row->name;
  result.tile_m = row->entry.tile.m;
  result.tile_n = row->entry.tile.n;
  return result;
}

template const ForwardEntry& KernelRegistry::select(const ForwardParams&, std::optional<Backend>) const;
template const BackwardEntry& KernelRegistry::select(const BackwardParams&, std::optional<Backend>) const;
template Explanation KernelRegistry::explain(const ForwardParams&, std::optional<Backend>) const;
template Explanation KernelRegistry::explain(const BackwardParams&, std::optional<Backend>) const;

// Of both operations.
template <class F>
void KernelRegistry::for_each_key(F&& f) const {
  for (const auto& row : forward_.all) f(row.entry.key);
  for (const auto& row : backward_.all) f(row.entry.key);
}

std::vector<KernelInfo> KernelRegistry::list() const {
  std::vector<KernelInfo> kernels;
  std::map<std::string, bool> gpu;  // by architecture
  const auto add = [&](const auto& row, const char* op) {
    const KernelKey& key = row.entry.key;
    bool available = row.available();
    if (key.backend != Backend::kCpu) {
      if (gpu.count(key.arch) == 0) gpu[key.arch] = gpu_available(key);
      available = gpu[key.arch];
    }
    kernels.push_back({row.name, op, name_of(key.backend), key.arch, to_string(key.dtype), key.head_dim, key.head_dim_v,
                       name_of(key.mask), words_of(key.features), key.any_alignment, key.splits_keys, key.fp8_kv,
                       row.entry.tile.m, row.entry.tile.n, available});
  };
  for (const auto& row : forward_.all) add(row, kOp<ForwardParams>);
  for (const auto& row : backward_.all) add(row, kOp<BackwardParams>);
  return kernels;
}

std::vector<std::string> KernelRegistry::cpu_isas() const {
  std::set<std::string> built;
  for_each_key([&](const KernelKey& key) { built.insert(key.arch); });
  std::vector<std::string> isas;
  for (const std::string& isa : known_cpu_isas())
    if (built.count(isa) != 0) isas.push_back(isa);
  return isas;
}

int KernelRegistry::cpu_head_dim() const {
  int widest = 0;
  for_each_key([&](const KernelKey& key) {
    if (key.backend == Backend::kCpu) widest = std::max(widest, key.head_dim);
  });
  return widest;
}

std::string KernelRegistry::cpu_isa() const {
  if (isa_error_) throw *isa_error_;
  return cpu_isa_;
}

std::vector<std::string> KernelRegistry::cuda_archs() const {
  std::vector<std::string> archs;
  for_each_key([&](const KernelKey& key) {
    if (key.backend != Backend::kCpu && !contains(archs, key.arch)) archs.emplace_back(key.arch);
  });
  return archs;
}

}  // namespace flashsdk
