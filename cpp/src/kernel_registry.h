// The kernel table: which kernels exist, which of them this machine runs, and which one a problem takes.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/kernel_entry.h"
#include "flashsdk/registry.h"

namespace flashsdk {

void add_all_kernels(KernelTable& table);  // written by cpp/kernels/table/write_sources.cpp

struct KernelEntries {
  std::vector<ForwardEntry> forward;
  std::vector<BackwardEntry> backward;
};

// Params is ForwardParams or BackwardParams, everywhere below.
class KernelRegistry {
 public:
  // Entries of one backend in priority order of their architectures, the fastest first. `forced_isa` as in
  // FLASHSDK_CPU_ISA: CPU kernels of faster instruction sets are refused; empty: none is.
  KernelRegistry(const KernelEntries& entries, const std::string& forced_isa);

  // All that the library was built with, and FLASHSDK_CPU_ISA as it was at the first call.
  static const KernelRegistry& instance();

  // The first entry that takes the problem. Throws kUnsupported when there is none, and on a CPU what is wrong with
  // `forced_isa`.
  template <class Params>
  const KernelEntry<Params>& select(const Params& p, std::optional<Backend> forced) const;
  template <class Params>
  Explanation explain(const Params& p, std::optional<Backend> forced) const;

  std::vector<KernelInfo> list() const;
  std::vector<std::string> cpu_isas() const;    // built in, slowest first
  std::string cpu_isa() const;                  // the one in use; throws like select
  int cpu_head_dim() const;                     // the largest of the CPU kernels
  std::vector<std::string> cuda_archs() const;  // built in

 private:
  template <class Params>
  struct Row {
    KernelEntry<Params> entry;
    int arch_rank;         // 0 is the fastest
    std::size_t position;  // among the entries
    std::string name;
    std::string machine_refusal;     // why this machine does not run it; empty: it does
    const char* preference_refusal;  // why it is passed over although it runs; null: it is not
    const KernelKey& key() const { return entry.key; }
    bool available() const { return machine_refusal.empty(); }
  };
  // The kernels of one operation.
  template <class Params>
  struct Rows {
    // Those that compete for a problem, in the order in which they are asked.
    using Bucket = std::vector<const Row<Params>*>;
    static constexpr std::size_t kDTypes = 5, kMasks = 3;

    Rows(const std::vector<KernelEntry<Params>>& entries, const std::string& forced_isa);
    Bucket& bucket(DType dtype, MaskKind mask, bool featured) {
      return buckets[(static_cast<std::size_t>(dtype) * kMasks + static_cast<std::size_t>(mask)) * 2 + featured];
    }
    const Bucket& bucket(DType dtype, MaskKind mask, bool featured) const {
      return const_cast<Rows*>(this)->bucket(dtype, mask, featured);
    }

    std::vector<Row<Params>> all;  // in priority order
    std::array<Bucket, kDTypes * kMasks * 2> buckets;
  };
  template <class Params>
  const Rows<Params>& rows() const {
    if constexpr (std::is_same_v<Params, ForwardParams>)
      return forward_;
    else
      return backward_;
  }
  template <class F>
  void for_each_key(F&& f) const;

  // The first row that takes the problem, or null; `refuse(row, reason)` hears of those before it.
  template <class Params, class Refuse>
  const Row<Params>* search(const Params& p, std::optional<Backend> forced, Refuse refuse) const;
  void check_isa(Device device) const;

  Rows<ForwardParams> forward_;
  Rows<BackwardParams> backward_;
  std::string cpu_isa_;
  std::optional<Error> isa_error_;  // what is wrong with the forced one
};

}  // namespace flashsdk
