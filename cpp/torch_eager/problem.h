// A call of attention besides q, k and v, and what its gradient is made from.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <limits>
#include <string>

namespace flashsdk::torch_eager {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int32_t>::max();  // of a band; as encode_mask has it

// A call besides q, k and v.
struct Problem {
  at::Tensor sink, seqused_q, seqused_k, block_table, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes;
  // Of dropout, int64, the bits of unsigned numbers: one element on the CPU, or AttentionArgs::seed_tensor, where q is.
  at::Tensor seed;

  bool packed = false, heads_first = false;  // heads first: q is (batch, num_heads, seqlen_q, head_dim)
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool band = false, top_left = false;
  std::int64_t left = kUnlimited, right = kUnlimited;
  bool scaled = false;  // by softmax_scale, else by head_dim^-1/2
  double softmax_scale = 0., softcap = 0., dropout_p = 0.;
  bool deterministic = false;
  std::int64_t num_splits = 0;  // 0: as many as pays
  std::string backend;

  // Whether it takes the operators that have more arguments: attention_fwd and attention_bwd.
  bool more() const {
    return sink.defined() || seqused_q.defined() || seqused_k.defined() || block_table.defined() || num_splits != 0;
  }

  // Gives the tensors that a gradient needs to `visit`, in the order of the operators' arguments: not block_table, as
  // pages have no backward.
  template <class Self, class Visit>
  static void visit_tensors(Self& p, Visit visit) {
    visit(p.sink), visit(p.seqused_q), visit(p.seqused_k), visit(p.cu_seqlens_q), visit(p.cu_seqlens_k);
    visit(p.bias), visit(p.alibi_slopes), visit(p.seed);
  }

  // Gives all but the tensors to `visit`, always in the same order.
  template <class Self, class Visit>
  static void visit_numbers(Self& p, Visit visit) {
    visit(p.packed), visit(p.heads_first), visit(p.max_seqlen_q), visit(p.max_seqlen_k);
    visit(p.band), visit(p.top_left), visit(p.left), visit(p.right);
    visit(p.scaled), visit(p.softmax_scale), visit(p.softcap), visit(p.dropout_p);
    visit(p.deterministic), visit(p.num_splits), visit(p.backend);
  }
};

// What a gradient is made from, in the order in which autograd holds it: q, k, v, out, lse and what visit_tensors()
// gives.
constexpr int kOut = 3, kLse = 4, kSaved = 13;
using Saved = std::array<at::Tensor, kSaved>;

}  // namespace flashsdk::torch_eager
