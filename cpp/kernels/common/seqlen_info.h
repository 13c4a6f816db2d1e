// Where one sequence of the batch lies and how long it is: the only place that knows batched, packed and used lengths.
#pragma once

#include "common/params.h"

namespace flashsdk {

struct SeqlenInfo {
  int offset_q = 0, offset_k = 0;  // first row in the packed tensors; 0 when batched
  int seqlen_q, seqlen_k;

  FLASHSDK_HD SeqlenInfo(const ForwardParams& p, int batch) : seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k) {
    if (p.cu_seqlens_q != nullptr) {
      offset_q = p.cu_seqlens_q[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - offset_q;
      offset_k = p.cu_seqlens_k[batch];
      seqlen_k = p.cu_seqlens_k[batch + 1] - offset_k;
    }
#if !defined(__CUDA_ARCH__)  // GPU kernels are not given used lengths (kernel_registry.cpp), and do not ask
    if (p.seqused_q != nullptr) seqlen_q = p.seqused_q[batch];
    if (p.seqused_k != nullptr) seqlen_k = p.seqused_k[batch];
#endif
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
  FLASHSDK_HD float* rows(const RowParam& t, int batch, int head) const {
    return t.ptr + batch * t.batch + head * t.head + offset_q * t.row;
  }
};

}  // namespace flashsdk
