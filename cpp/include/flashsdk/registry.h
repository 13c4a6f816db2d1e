// What kernels this build has, and which one a call takes.
#pragma once

#include <string>
#include <vector>

#include "flashsdk/attention.h"

namespace flashsdk {

struct KernelInfo {
  std::string name;     // e.g. "cpu_avx2_bf16_d128_band_fwd"
  std::string op;       // "fwd" or "bwd"
  std::string backend;  // "cpu", "sm80", "sm90"
  std::string arch;     // instruction set or GPU architecture: "avx512_bf16", "sm_90a"
  std::string dtype;
  int head_dim, head_dim_v;           // the largest that it takes
  std::string mask;                   // "dense", "band", "block_sparse"
  std::vector<std::string> features;  // compiled in, of "softcap", "bias", "alibi", "dropout"
  bool any_alignment;                 // of a GPU's: takes tensors that are not aligned to 16 bytes
  bool splits_keys;                   // of few queries, among thread blocks of a GPU
  bool fp8_kv;                        // of a GPU's: k and v are float8_e4m3fn, else of dtype
  int tile_m, tile_n;                 // queries x keys
  bool available;                     // this machine can run it
};

FLASHSDK_API std::vector<KernelInfo> kernels();

struct Explanation {
  std::string kernel;          // empty when none fits
  int tile_m = 0, tile_n = 0;  // its tiles, queries x keys
  struct Refusal {
    std::string kernel;
    std::string reason;
  };
  std::vector<Refusal> refused;  // those for this dtype, head_dim and mask that come before it, in priority order
  // Where heads of a group are computed as rows of one head: "query heads packed: 4 rows a head of keys"; else empty.
  std::string packing;
};

// Validates like workspace_size().
FLASHSDK_API Explanation explain(const ForwardArgs& args);
FLASHSDK_API Explanation explain(const BackwardArgs& args);

struct BuildInfo {
  std::string version;
  std::string compiler;
  std::vector<std::string> cpu_isas;  // built in, slowest first
  std::string cpu_isa;                // the one in use
  int cpu_head_dim;                   // the largest that its kernels take
  bool cuda;
  std::vector<std::string> cuda_archs;
  bool nvtx;  // calls are ranges of NVTX, which profilers show
};
FLASHSDK_API BuildInfo build_info();

}  // namespace flashsdk
