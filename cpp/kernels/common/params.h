// What a kernel is told: plain data, validated once in cpp/src/validate.cpp and trusted from there on.
#pragma once

#include <bit>
#include <cstdint>

#include "common/features.h"
#include "common/host_device.h"
#include "flashsdk/tensor.h"

namespace flashsdk {

// A (batch, row, head, element) tensor; the element stride is 1. Packed tensors have batch = 0. Strides in elements.
struct TensorParam {
  void* ptr = nullptr;
  std::int64_t batch = 0, row = 0, head = 0;
};

// Where a key lies in the pages of its sequence.
struct PagePlace {
  int page, row;
  // Sizes are mostly powers of two; a division would take a GPU as long as reading the table.
  static FLASHSDK_HD PagePlace of(int key, int size) {
    if ((size & (size - 1)) != 0) return {key / size, key % size};
    return {key >> log2_of(size), key & (size - 1)};
  }

 private:
  static FLASHSDK_HD int log2_of(int power) {
#if defined(__CUDA_ARCH__)
    return 31 - __clz(power);
#else
    return std::countr_zero(static_cast<unsigned>(power));
#endif
  }
};

// Keys in pages: key j of a sequence is row j % size of page table[j / size]. k.batch and v.batch step over pages.
struct PageParam {
  const std::int32_t* table = nullptr;  // (batch, pages of the longest sequence); null: no pages
  std::int64_t batch = 0;
  int size = 0, count = 0;  // rows of a page, and how many pages there are
};

// A fp32 value per query: (batch, num_heads, seqlen_q), packed (num_heads, total_q) with batch = 0.
struct RowParam {
  float* ptr = nullptr;
  std::int64_t batch = 0, head = 0, row = 1;
};

// Additive bias (float) or visibility (bool), broadcast by stride 0: (batch, num_heads, seqlen_q, seqlen_k).
struct BiasParam {
  const void* ptr = nullptr;  // null: none
  DType dtype = DType::kFloat32;
  std::int64_t batch = 0, head = 0, row = 0, col = 0;
};

struct BandParam {
  // Unlimited is ±kUnlimited: far beyond any index, and safe to add to one without overflow in 64 bits.
  static constexpr std::int64_t kUnlimited = std::int64_t{1} << 40;
  std::int64_t left = kUnlimited;
  std::int64_t right = kUnlimited;
  bool top_left = false;
};

// CSR lists of one kind of block for every batch and head; stride 0 shares a layout.
struct BlockListParam {
  const std::int32_t* offsets = nullptr;  // (batch | 1, num_heads | 1, lines + 1)
  const std::int32_t* indices = nullptr;
  std::int64_t batch = 0, head = 0;  // strides of offsets
};

enum class MaskKind : std::uint8_t { kDense, kBand, kBlockSparse };

struct MaskParam {
  MaskKind kind = MaskKind::kDense;
  BandParam band;  // of the whole problem (kBand), or inside partial blocks (kBlockSparse)
  int block_q = 0, block_k = 0;
  BlockListParam row_partial, row_full, col_partial, col_full;
  const void* user = nullptr;  // for policies compiled in by an application
};

struct DropoutParam {
  int threshold = 0;  // of 256: an element is dropped when its random byte is below; 0 = no dropout
  std::uint64_t seed = 0, offset = 0;
  // Seed and offset where the tensors are, in place of the above: (2) or (batch, 2).
  const std::uint64_t* state = nullptr;
  std::int64_t state_batch = 0;
  // A head's number among all is first_head + batch·heads_each + head: heads_each is num_heads, or 0 where each
  // sequence has a state of its own; first_head is of a part of a batch (cuda/host/batch_parts.h).
  int first_head = 0, heads_each = 0;
  FLASHSDK_HD float scale() const { return 256.f / (256.f - static_cast<float>(threshold)); }
};

struct ScoreParam {
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0 = off
  BiasParam bias;
  const float* alibi_slopes = nullptr;  // (batch | 1, num_heads); null = off
  std::int64_t alibi_batch = 0;
  DropoutParam dropout;

  // What the call asks for.
  Features features() const {
    return (softcap > 0.f ? Features::kSoftcap : Features::kNone) |
           (bias.ptr != nullptr ? Features::kBias : Features::kNone) |
           (alibi_slopes != nullptr ? Features::kAlibi : Features::kNone) |
           (dropout.threshold > 0 ? Features::kDropout : Features::kNone);
  }
  bool any_feature() const { return features() != Features::kNone; }
};

// A logit of each head that joins the softmax of its queries: float32 (num_heads). Where heads are rows of one head
// (cpp/src/pack_heads.cpp), of each row.
struct SinkParam {
  const float* ptr = nullptr;  // null: none
  std::int64_t head = 1, row = 0;
  FLASHSDK_HD const float* of(int head_, int row_) const {
    return ptr == nullptr ? nullptr : ptr + head_ * head + row_ * row;
  }
};

// What fp8 keys or values are multiplied by: float32 (batch, num_heads_kv).
struct DescaleParam {
  const float* ptr = nullptr;  // null: 1
  std::int64_t batch = 0, head = 0;
  FLASHSDK_HD float of(int batch_, int head_kv) const {
    return ptr == nullptr ? 1.f : ptr[batch_ * batch + head_kv * head];
  }
};

struct ForwardParams {
  DType dtype = DType::kFloat32;     // of q and out, and in a backward of all
  DType dtype_kv = DType::kFloat32;  // of k and v: dtype, or kFloat8E4M3 in a forward
  Device device;
  int batch = 0;
  int num_heads = 0, num_heads_kv = 0;
  int head_dim = 0, head_dim_v = 0;
  int seqlen_q = 0, seqlen_k = 0;              // packed: upper bounds
  int total_q = 0, total_k = 0;                // rows of q and k: packed all, batched of each sequence
  const std::int32_t* cu_seqlens_q = nullptr;  // packed: (batch + 1); null = batched
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* seqused_q = nullptr;  // batched: (batch), lengths in place of seqlen_q; null = all are seqlen_q
  const std::int32_t* seqused_k = nullptr;
  bool deterministic = false;
  int num_splits = 0;  // parts of the keys of a query, at most; 0: as many as pay. CPU kernels ask the sequence alone
  PageParam pages;
  TensorParam q, k, v, out;
  RowParam lse;
  MaskParam mask;
  ScoreParam score;
  SinkParam sink;
  DescaleParam k_descale, v_descale;  // only of fp8 keys and values

  FLASHSDK_HD int heads_per_group() const { return num_heads / num_heads_kv; }
  FLASHSDK_HD bool fp8_kv() const { return dtype_kv == DType::kFloat8E4M3; }
  // Whether sequences lie behind each other, in tensors of one batch.
  FLASHSDK_HD bool packed() const { return cu_seqlens_q != nullptr; }
  // Whether sequences have lengths of their own, of which seqlen_q and seqlen_k are bounds.
  FLASHSDK_HD bool ragged_queries() const { return packed() || seqused_q != nullptr; }
  FLASHSDK_HD bool ragged_keys() const { return packed() || seqused_k != nullptr; }
  FLASHSDK_HD bool ragged() const { return ragged_queries() || ragged_keys(); }
};

// The backward needs all the forward had, and the gradients.
struct BackwardParams : ForwardParams {
  TensorParam dout, dq, dk, dv;
  RowParam dlse;           // ptr null: zero
  float* dsink = nullptr;  // (num_heads), contiguous; null where there is no sink
};

}  // namespace flashsdk
