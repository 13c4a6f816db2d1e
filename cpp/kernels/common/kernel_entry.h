// One row of the kernel table: what the host knows of a kernel. Tile sizes are read from here and nowhere else.
#pragma once

#include <cstddef>
#include <string>

#include "common/features.h"
#include "common/mask_policy.h"
#include "common/params.h"

namespace flashsdk {

enum class Backend : std::uint8_t { kCpu, kSm80, kSm90 };

struct KernelKey {
  Backend backend;
  const char* arch;  // instruction set ("avx512") or GPU architecture ("sm_90a")
  DType dtype;
  int head_dim, head_dim_v;  // the largest
  MaskKind mask;
  Features features;           // compiled in
  bool any_alignment = false;  // of a GPU's: takes tensors that are not aligned to 16 bytes
  bool splits_keys = false;    // among thread blocks, where there are few queries
  bool fp8_kv = false;         // of a GPU's: k and v are float8_e4m3fn, else of dtype
};

// Runs fn(context, slot) on up to num_threads threads at once, one of them the caller, and returns when all are done.
// slot is in [0, num_threads) and unique among those running; how many run is not promised.
struct ParallelRunner {
  int num_threads = 1;
  void* pool = nullptr;
  void (*run)(void* pool, int num_threads, void (*fn)(void* context, int slot), void* context) = nullptr;

  template <class F>
  void operator()(F& fn) const {
    run(pool, num_threads, [](void* context, int slot) { (*static_cast<F*>(context))(slot); }, &fn);
  }
};

struct LaunchContext {
  void* workspace = nullptr;
  void* stream = nullptr;   // cudaStream_t
  ParallelRunner parallel;  // CPU
};

// Params is ForwardParams or BackwardParams.
template <class Params>
struct KernelEntry {
  KernelKey key;
  Tile tile;
  // Why the kernel does not take a problem that its key admits, or null when it does. The function may be null: it
  // takes them all.
  const char* (*can_implement)(const Params&);
  std::size_t (*workspace_size)(const Params&, int num_threads);
  void (*launch)(const Params&, const LaunchContext&);
};
using ForwardEntry = KernelEntry<ForwardParams>;
using BackwardEntry = KernelEntry<BackwardParams>;

// Filled by explicit calls from generated code, in priority order.
class KernelTable {
 public:
  virtual void add(const ForwardEntry& entry) = 0;
  virtual void add(const BackwardEntry& entry) = 0;

 protected:
  ~KernelTable() = default;
};

}  // namespace flashsdk
