// A call of one of aten's fused attention kernels: what the core is told of it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

#include "flashsdk/attention.h"
#include "operators.h"

namespace flashsdk::torch_sdpa {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeDouble = std::optional<double>;

// Sequences behind one another: int32 (batch + 1), where each begins, and the length of the longest.
struct Packed {
  const Tensor &cu_seqlens_q, &cu_seqlens_k;
  std::int64_t max_seqlen_q, max_seqlen_k;
};

struct Call {
  const Tensor &q, &k, &v;
  double dropout_p;
  std::optional<Band> band;
  MaybeDouble scale;
  const MaybeTensor& mask;
  bool heads_first = true;         // of (batch, heads, seqlen, dim); else (batch, seqlen, heads, dim)
  const Packed* packed = nullptr;  // of (total, heads, dim)
};

// Autograd hands on an undefined tensor for none.
bool given(const MaybeTensor& t);

// Both are false where this is not for our kernels; outputs are then as they were. Makes lse, in rows of a head.
bool forward(const Call& c, const Tensor& out, Tensor& lse);
bool backward(const Call& c, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& dq,
              const Tensor& dk, const Tensor& dv);

// What aten's flash attention returns of dropout, and nobody reads without it. On a GPU it lies behind the lse that
// forward() made, in the same memory. A call took 15.8 us of an H100's host with memory of their own, and takes 12.3
// with this; ours called directly takes 9.8 (measured). A CPU gains nothing: there the results alias as little as the
// schema says.
struct DropoutState {
  static constexpr std::size_t kBytes = 16, kAlignment = 8;
  Tensor state, unused, mask;

  DropoutState(const Tensor& lse, at::ScalarType dtype);
};

// Before any call.
void set_sdpa_host(const torch_ops::Host& host);

// Told of each call of both directions, and whether it was for our kernels; nullptr: nobody is.
using Watcher = void (*)(const Call& c, bool is_backward, bool taken);
void set_sdpa_watcher(Watcher watcher);

}  // namespace flashsdk::torch_sdpa
