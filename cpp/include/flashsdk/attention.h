// Exact attention, forward and backward (FlashAttention, arXiv 2205.14135). Semantics: docs/semantics.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "flashsdk/mask.h"
#include "flashsdk/tensor.h"
#include "flashsdk/threads.h"

namespace flashsdk {

// What forward and backward share. All tensors live on one device; the last dimension is contiguous, the others have
// any stride. Packed (varlen) problems give cu_seqlens_q, and their tensors have no batch dimension.
struct AttentionArgs {
  TensorView q;  // (batch, seqlen_q, num_heads, head_dim)        packed: (total_q, num_heads, head_dim)
  TensorView k;  // (batch, seqlen_k, num_heads_kv, head_dim)     packed: (total_k, num_heads_kv, head_dim)
  TensorView v;  // (batch, seqlen_k, num_heads_kv, head_dim_v)   packed: (total_k, num_heads_kv, head_dim_v)

  Mask mask = Dense{};
  std::optional<double> softmax_scale;  // head_dim^-1/2 when absent; computed with in float32, as softcap
  double softcap = 0.;                  // > 0: s becomes softcap·tanh(s / softcap)
  TensorView bias;  // float dtype or bool (true = attend), (batch, num_heads, seqlen_q, seqlen_k), each of them or 1;
                    // packed: (…, max_seqlen_q, max_seqlen_k), indexed from the start of each sequence
  TensorView alibi_slopes;  // float32 (num_heads) or (batch, num_heads)
  TensorView sink;  // float32 (num_heads): a logit that joins the softmax of each query and has no value; lse counts it

  double dropout_p = 0.;  // in [0, 1), rounded to the nearest multiple of 1/256, at most 255/256
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  // {seed, offset} where q is, in place of the two: int64 or uint64 (2), or (batch, 2), of each sequence, whose heads
  // then count from 0. The kernel reads it, so that a CUDA graph that was captured draws anew when it changes.
  TensorView seed_tensor;

  TensorView cu_seqlens_q;        // packed: int32 (batch + 1), from 0, ascending
  TensorView cu_seqlens_k;        // packed: int32 (batch + 1)
  std::int64_t max_seqlen_q = 0;  // packed: upper bound of the lengths; batched: 0
  std::int64_t max_seqlen_k = 0;

  // Batched: int32 (batch), how many queries and keys of each sequence are used. Masks, ALiBi, bias and dropout count
  // with these lengths. Unused queries have out 0 and lse -inf, unused keys are not read; gradients of both are 0.
  TensorView seqused_q;
  TensorView seqused_k;

  // Forward, with seqused_k: int32 (batch, max_pages). k and v are pages, (num_pages, page_size, num_heads_kv,
  // head_dim): key j of sequence b is row j % page_size of page block_table[b, j / page_size]. seqlen_k is
  // max_pages·page_size.
  TensorView block_table;

  // Forward, of k and v in float8_e4m3fn beside a 16-bit q, which lie in memory as k / k_descale and v / v_descale:
  // float32 (batch, num_heads_kv), each of them or 1; not given: 1. Packed and paged alike.
  TensorView k_descale, v_descale;

  // Into how many parts the keys of a query may be cut: 1 makes its bits depend on its own sequence alone, and on a
  // GPU on the shapes of q and k; 0 chooses. On a CPU they never depend on more.
  int num_splits = 0;
  bool deterministic = false;  // bit-identical from run to run, or an error
  std::string backend;         // "" = the best that fits, else "cpu", "sm80", "sm90"
};

struct ForwardArgs : AttentionArgs {
  TensorView out;  // (batch, seqlen_q, num_heads, head_dim_v)    packed: (total_q, num_heads, head_dim_v)
  TensorView lse;  // float32 (batch, num_heads, seqlen_q)        packed: (num_heads, total_q); natural logarithm
};

struct BackwardArgs : AttentionArgs {
  TensorView dout, out;   // as out above
  TensorView lse;         // as the forward wrote it
  TensorView dlse;        // optional gradient of lse, same shape
  TensorView dq, dk, dv;  // outputs, as q, k, v
  TensorView dsink;       // output where there is a sink: float32 (num_heads)
};

// Of kernels of one's own: flashsdk/kernels/common/own_kernel.h.
template <class Params>
struct KernelEntry;
struct ForwardParams;
struct BackwardParams;

struct Workspace {
  void* data = nullptr;
  std::size_t size = 0;  // bytes
};

struct LaunchOptions {
  Workspace
      workspace{};  // at least workspace_size() bytes on the tensors' device, 256-byte aligned; contents are scratch
  void* stream = nullptr;  // cudaStream_t; unused on a CPU
};

// A call that is checked and has its kernel: what does not depend on what the tensors contain is done, once.
//
//   const flashsdk::Plan plan = flashsdk::plan(args);
//   plan.launch({{buffer, plan.workspace_size()}, stream});
//
// It holds the addresses of the tensors and of the mask's lists, not their memory: these must live until the last
// launch is done. Copies share what they hold; any thread may launch one, with a workspace of its own for each launch.
// What q, k, v and the like contain may change between launches. On a CPU so may cu_seqlens, seqused and the lists of
// a BlockMask: each launch reads and checks them again, and throws where they have come to need more workspace.
class FLASHSDK_API Plan {
 public:
  Plan(const Plan&) = default;  // a move is a copy: no Plan is ever empty
  Plan& operator=(const Plan&) = default;

  // Bytes of workspace that a launch needs, on a CPU for the number of threads that was set when the plan was made.
  std::size_t workspace_size() const noexcept;
  // As mha_fwd, mha_bwd or those for packed sequences. Throws when the workspace or the stream does not do; nothing has
  // been written then.
  void launch(const LaunchOptions& options = {}) const;

 private:
  friend FLASHSDK_API Plan plan(const ForwardArgs& args);
  friend FLASHSDK_API Plan plan(const BackwardArgs& args);
  friend FLASHSDK_API Plan plan_own(const ForwardArgs&, const KernelEntry<ForwardParams>&, const void*);
  friend FLASHSDK_API Plan plan_own(const BackwardArgs&, const KernelEntry<BackwardParams>&, const void*);
  struct Call;
  explicit Plan(std::shared_ptr<const Call> call) noexcept;
  std::shared_ptr<const Call> call_;
};

// Throws Error, one line, for what is wrong with args. With args.cu_seqlens_q/k they are of packed sequences.
FLASHSDK_API Plan plan(const ForwardArgs& args);
FLASHSDK_API Plan plan(const BackwardArgs& args);

// What plan(args).workspace_size() is; outputs, and what a backward gets from the forward, may still be missing.
FLASHSDK_API std::size_t workspace_size(const ForwardArgs& args);
FLASHSDK_API std::size_t workspace_size(const BackwardArgs& args);

// plan(args).launch(options). Writes args.out and args.lse. On a GPU it is launched on the stream, and nothing is
// allocated or waited for; on a CPU it is done on return, and threads that are missing are started.
FLASHSDK_API void mha_fwd(const ForwardArgs& args, const LaunchOptions& options = {});

// Writes args.dq, args.dk and args.dv; recomputes the probabilities from q, k and lse.
FLASHSDK_API void mha_bwd(const BackwardArgs& args, const LaunchOptions& options = {});

// The same for packed sequences: args.cu_seqlens_q/k and args.max_seqlen_q/k are required. Rows past the last sequence
// are those of queries that see no key: out and gradients 0, lse -inf.
FLASHSDK_API void mha_varlen_fwd(const ForwardArgs& args, const LaunchOptions& options = {});
FLASHSDK_API void mha_varlen_bwd(const BackwardArgs& args, const LaunchOptions& options = {});

// What is written behind the used keys of a cache, and rotated on the way. All tensors are on one device.
struct KvAppendArgs {
  // Written: (batch, seqlen_k, num_heads_kv, head_dim or head_dim_v), or pages. Of k's dtype. Where k has 16
  // bits, float8_e4m3fn too.
  TensorView k_cache, v_cache;
  TensorView k, v;         // (batch, seqlen_new, num_heads_kv, head_dim or head_dim_v)
  TensorView seqused_k;    // int32 (batch): new key j of sequence b becomes key seqused_k[b] + j
  TensorView block_table;  // of pages, as in AttentionArgs
  TensorView q, q_out;     // optional: (batch, seqlen_q, num_heads, head_dim), and where it goes rotated

  // (positions, rotary_dim / 2), float32 or of the dtype of k: of the first rotary_dim elements pair n is turned by the
  // angle of its position. Pairs are (n, n + rotary_dim / 2), or neighbours (2n, 2n + 1). None of both: no rotation.
  TensorView rotary_cos, rotary_sin;
  bool rotary_interleaved = false;
  bool q_advances = true;  // query i stands at seqused_k[b] + i; else all stand at seqused_k[b]

  // float32 (batch or 1, num_heads_kv or 1), of caches in float8_e4m3fn. These get rotated k / k_descale and
  // v / v_descale, rounded once; what lies beyond 448 becomes ±448. Not given: nothing is divided.
  TensorView k_descale, v_descale;
};

// Appends k and v, on a GPU on options.stream; no workspace. seqused_k stays as it is: the caller adds seqlen_new.
FLASHSDK_API void kv_append(const KvAppendArgs& args, const LaunchOptions& options = {});

}  // namespace flashsdk
