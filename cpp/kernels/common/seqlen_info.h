// Where one sequence of the batch lies and how long it is: the only place that knows batched, packed and used lengths.
// Of pages it knows where a key lies; kernels that ask for many at once read the table themselves.
#pragma once

#include "common/params.h"

namespace flashsdk {

// Where the keys of one sequence and head lie, in k or in v.
template <class T>
class KeyRows {
 public:
  KeyRows() = default;
  FLASHSDK_HD KeyRows(T* first, std::int64_t stride) : first_(first), stride_(stride) {}
  // `first` is that of page 0, and pages are `page` elements apart.
  FLASHSDK_HD KeyRows(T* first, std::int64_t stride, std::int64_t page, const std::int32_t* table, int page_size)
      : first_(first), stride_(stride), page_(page), table_(table), page_size_(page_size) {}

  FLASHSDK_HD T* at(int key) const {
    if (table_ == nullptr) return first_ + key * stride_;
    const PagePlace place = PagePlace::of(key, page_size_);
    return first_ + table_[place.page] * page_ + place.row * stride_;
  }
  // How many keys from this one on are a stride apart.
  FLASHSDK_HD int run(int key) const {
    return table_ == nullptr ? 0x7FFFFFFF : page_size_ - PagePlace::of(key, page_size_).row;
  }
  FLASHSDK_HD std::int64_t stride() const { return stride_; }
  FLASHSDK_HD T* any() const { return first_; }  // an address that can be computed with, though not read

 private:
  T* first_ = nullptr;
  std::int64_t stride_ = 0, page_ = 0;
  const std::int32_t* table_ = nullptr;
  int page_size_ = 0;
};

// Where tensors have a sequence: packed ones are one batch.
FLASHSDK_HD int batch_in_tensors(const ForwardParams& p, int sequence) { return p.packed() ? 0 : sequence; }

// How many keys a sequence has, or queries: the one alone.
template <bool kOfKeys>
FLASHSDK_HD int length_of(const ForwardParams& p, int sequence) {
  const std::int32_t* cu = kOfKeys ? p.cu_seqlens_k : p.cu_seqlens_q;
  if (cu != nullptr) return cu[sequence + 1] - cu[sequence];
  const std::int32_t* used = kOfKeys ? p.seqused_k : p.seqused_q;
  return used != nullptr ? used[sequence] : kOfKeys ? p.seqlen_k : p.seqlen_q;
}

// The queries or the keys of all sequences, by their ends.
struct SequenceRows {
  const std::int32_t *cu_seqlens, *seqused;  // both null: all rows are used
  int batch, total;                          // rows of the tensor: packed all, batched of each sequence

  static FLASHSDK_HD SequenceRows of_queries(const ForwardParams& p) {
    return {p.cu_seqlens_q, p.seqused_q, p.batch, p.total_q};
  }
  static FLASHSDK_HD SequenceRows of_keys(const ForwardParams& p) {
    return {p.cu_seqlens_k, p.seqused_k, p.batch, p.total_k};
  }

  // Rows of the tensor that no sequence has, in each batch of it: from first_unused() on.
  FLASHSDK_HD bool any_unused() const { return cu_seqlens != nullptr || seqused != nullptr; }
  FLASHSDK_HD int batches() const { return cu_seqlens != nullptr ? 1 : batch; }
  FLASHSDK_HD int first_unused(int of_batch) const {
    return cu_seqlens != nullptr ? cu_seqlens[batch] : seqused != nullptr ? seqused[of_batch] : total;
  }
};

struct SeqlenInfo {
  int offset_q = 0, offset_k = 0;  // first row in the packed tensors; 0 when batched
  int seqlen_q, seqlen_k;

  FLASHSDK_HD SeqlenInfo(int offset_q, int seqlen_q, int seqlen_k)  // of queries alone
      : offset_q(offset_q), seqlen_q(seqlen_q), seqlen_k(seqlen_k) {}
  // asks_used: false in kernels that no call with used lengths reaches. To ask there, in vain, has cost up to 4 %:
  // ptxas orders the backward's step at head_dim 256 otherwise.
  FLASHSDK_HD SeqlenInfo(const ForwardParams& p, int batch, bool asks_used = true)
      : seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k) {
    if (p.packed()) {
      offset_q = p.cu_seqlens_q[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - offset_q;
      offset_k = p.cu_seqlens_k[batch];
      seqlen_k = p.cu_seqlens_k[batch + 1] - offset_k;
    }
    if (!asks_used) return;
    if (p.seqused_q != nullptr) seqlen_q = p.seqused_q[batch];
    if (p.seqused_k != nullptr) seqlen_k = p.seqused_k[batch];
  }

  // First row of q, out, dout, dq (…_q) or k, v, dk, dv (…_k) of this sequence and head.
  template <class T>
  FLASHSDK_HD T* head_q(const TensorParam& t, int batch, int head) const {
    return static_cast<T*>(t.ptr) + batch * t.batch + offset_q * t.row + head * t.head;
  }
  template <class T>
  FLASHSDK_HD T* head_k(const TensorParam& t, int batch, int head) const {
    return static_cast<T*>(t.ptr) + batch * t.batch + offset_k * t.row + head * t.head;
  }
  template <class T>
  FLASHSDK_HD KeyRows<T> keys(const ForwardParams& p, const TensorParam& t, int batch, int head) const {
    if (p.pages.table == nullptr) return {head_k<T>(t, batch, head), t.row};
    return {head_k<T>(t, 0, head), t.row, t.batch, p.pages.table + batch * p.pages.batch, p.pages.size};
  }
  FLASHSDK_HD float* rows(const RowParam& t, int batch, int head) const {
    return t.ptr + batch * t.batch + head * t.head + offset_q * t.row;
  }
};

}  // namespace flashsdk
