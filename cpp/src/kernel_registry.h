// The kernel table: which kernels exist, which of them this machine runs, and which one a problem takes.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "common/kernel_entry.h"
#include "flashsdk/registry.h"

namespace flashsdk {

void add_all_kernels(KernelTable& table);  // generated from cpp/kernels/instantiate

class KernelRegistry {
 public:
  // Entries of one backend in priority order of their architectures, the fastest first. `forced_isa` as in
  // FLASHSDK_CPU_ISA: CPU kernels of faster instruction sets are refused; empty: none is.
  KernelRegistry(const std::vector<KernelEntry>& entries, const std::string& forced_isa);

  // All that the library was built with, and FLASHSDK_CPU_ISA as it was at the first call.
  static const KernelRegistry& instance();

  // The first entry that takes the problem. Throws kUnsupported when there is none, and on a CPU what is wrong with
  // `forced_isa`.
  const KernelEntry& select(Op op, const ForwardParams& p, std::optional<Backend> forced) const;

  Explanation explain(Op op, const ForwardParams& p, std::optional<Backend> forced) const;
  std::vector<KernelInfo> list() const;
  std::vector<std::string> cpu_isas() const;    // built in, slowest first
  std::string cpu_isa() const;                  // the one in use; throws like select
  std::vector<std::string> cuda_archs() const;  // built in

 private:
  struct Row {
    KernelEntry entry;
    int arch_rank;  // 0 is the fastest
    std::string name;
    std::string machine_refusal;     // why this machine does not run it; empty: it does
    const char* preference_refusal;  // why it is passed over although it runs; null: it is not
    bool available() const { return machine_refusal.empty(); }
  };
  // Rows that compete for a problem: all that the key decides beside head_dim.
  using Bucket = std::vector<const Row*>;
  Bucket& bucket(Op op, DType dtype, MaskKind mask, bool score_features);
  const Bucket& bucket(Op op, DType dtype, MaskKind mask, bool score_features) const;

  // The first row that takes the problem, or null; `refuse(row, reason)` hears of those before it.
  template <class Refuse>
  const Row* search(Op op, const ForwardParams& p, std::optional<Backend> forced, Refuse refuse) const;
  void check_isa(Device device) const;

  static constexpr std::size_t kOps = 2, kDTypes = 5, kMasks = 3;
  std::vector<Row> rows_;  // in priority order
  std::array<Bucket, kOps * kDTypes * kMasks * 2> bucket_;
  std::string cpu_isa_;
  std::optional<Error> isa_error_;  // what is wrong with the forced one
};

}  // namespace flashsdk
