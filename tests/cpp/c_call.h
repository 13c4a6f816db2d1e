// A call of the C API, made from one of the C++ API.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "flashsdk/c_api.h"
#include "flashsdk/flashsdk.h"
#include "problem.h"

namespace flashsdk::testing {

class CCall {
 public:
  flashsdk_attention_args args{};

  // Of the forward's and the backward's tensors; the mask's lists are those of `args`, too.
  explicit CCall(const BackwardArgs& a) {
    args.struct_size = sizeof args;
    args.q = tensor(a.q);
    args.k = tensor(a.k);
    args.v = tensor(a.v);
    args.out = tensor(a.out);
    args.lse = tensor(a.lse);
    args.dout = tensor(a.dout);
    args.dlse = tensor(a.dlse);
    args.dq = tensor(a.dq);
    args.dk = tensor(a.dk);
    args.dv = tensor(a.dv);
    if (a.softmax_scale) args.softmax_scale = &(scale_ = *a.softmax_scale);
    args.softcap = a.softcap;
    args.bias = tensor(a.bias);
    args.alibi_slopes = tensor(a.alibi_slopes);
    args.dropout_p = a.dropout_p;
    args.seed = a.seed;
    args.offset = a.offset;
    args.seed_tensor = tensor(a.seed_tensor);
    args.cu_seqlens_q = tensor(a.cu_seqlens_q);
    args.cu_seqlens_k = tensor(a.cu_seqlens_k);
    args.seqused_q = tensor(a.seqused_q);
    args.seqused_k = tensor(a.seqused_k);
    args.sink = tensor(a.sink);
    args.dsink = tensor(a.dsink);
    args.block_table = tensor(a.block_table);
    args.k_descale = tensor(a.k_descale);
    args.v_descale = tensor(a.v_descale);
    args.num_splits = a.num_splits;
    args.max_seqlen_q = a.max_seqlen_q;
    args.max_seqlen_k = a.max_seqlen_k;
    args.deterministic = a.deterministic ? 1 : 0;
    backend_ = a.backend;
    if (!backend_.empty()) args.backend = backend_.c_str();
    if (const auto* b = std::get_if<Band>(&a.mask)) args.band = band(*b);
    if (const auto* m = std::get_if<BlockMask>(&a.mask)) args.block_mask = block_mask(*m);
  }
  CCall(const CCall&) = delete;
  CCall& operator=(const CCall&) = delete;

  // What a caller may do once it has its plan.
  void forget() {
    for (flashsdk_tensor& t : tensors_) std::memset(&t, 0xFF, sizeof t);
    for (TensorView& v : views_) v = {};
    std::memset(&args, 0xFF, sizeof args);
    std::memset(&band_, 0xFF, sizeof band_);
    std::memset(&block_mask_, 0xFF, sizeof block_mask_);
    backend_.assign(backend_.size(), '?');
    scale_ = NAN;
  }

  const flashsdk_tensor* tensor(const TensorView& view) {
    if (!view.given()) return nullptr;
    views_.push_back(view);
    flashsdk_tensor t{};
    // Half of the address in the offset, as slices of frameworks have it.
    t.data = static_cast<char*>(view.data) - 64;
    t.byte_offset = 64;
    t.device.device_type = FLASHSDK_CPU;
    t.ndim = view.rank;
    t.dtype = dtype(view.dtype);
    t.shape = views_.back().shape.data();
    t.strides = views_.back().stride.data();
    tensors_.push_back(t);
    return &tensors_.back();
  }

 private:
  static decltype(flashsdk_tensor::dtype) dtype(DType d) {
    switch (d) {
      case DType::kFloat32:
        return {FLASHSDK_FLOAT, 32, 1};
      case DType::kFloat16:
        return {FLASHSDK_FLOAT, 16, 1};
      case DType::kBFloat16:
        return {FLASHSDK_BFLOAT, 16, 1};
      case DType::kInt32:
        return {FLASHSDK_INT, 32, 1};
      case DType::kBool:
        return {FLASHSDK_BOOL, 8, 1};
      case DType::kInt64:
        return {FLASHSDK_INT, 64, 1};
      case DType::kUInt64:
        return {FLASHSDK_UINT, 64, 1};
      case DType::kFloat8E4M3:
        return {FLASHSDK_FLOAT8_E4M3FN, 8, 1};
    }
    return {};
  }
  const flashsdk_band* band(const Band& b) {
    band_ = {sizeof band_, b.left.value_or(FLASHSDK_UNLIMITED), b.right.value_or(FLASHSDK_UNLIMITED),
             b.alignment == Alignment::kTopLeft ? FLASHSDK_TOP_LEFT : FLASHSDK_BOTTOM_RIGHT, 0};
    return &band_;
  }
  const flashsdk_block_mask* block_mask(const BlockMask& m) {
    block_mask_.struct_size = sizeof block_mask_;
    block_mask_.block_q = m.block_q;
    block_mask_.block_k = m.block_k;
    block_mask_.row_partial_offsets = tensor(m.row_partial.offsets);
    block_mask_.row_partial_indices = tensor(m.row_partial.indices);
    block_mask_.row_full_offsets = tensor(m.row_full.offsets);
    block_mask_.row_full_indices = tensor(m.row_full.indices);
    block_mask_.col_partial_offsets = tensor(m.col_partial.offsets);
    block_mask_.col_partial_indices = tensor(m.col_partial.indices);
    block_mask_.col_full_offsets = tensor(m.col_full.offsets);
    block_mask_.col_full_indices = tensor(m.col_full.indices);
    block_mask_.seqlen_q = m.seqlen_q;
    block_mask_.seqlen_k = m.seqlen_k;
    if (m.band) args.band = band(*m.band);
    return &block_mask_;
  }

  std::deque<TensorView> views_;  // whose elements stay where they are
  std::deque<flashsdk_tensor> tensors_;
  flashsdk_band band_{};
  flashsdk_block_mask block_mask_{};
  std::string backend_;
  double scale_ = 0;
};

struct Destroy {
  void operator()(flashsdk_plan* plan) const { flashsdk_plan_destroy(plan); }
  void operator()(flashsdk_block_lists* lists) const { flashsdk_block_lists_destroy(lists); }
};
using PlanPtr = std::unique_ptr<flashsdk_plan, Destroy>;
inline flashsdk_status launch(const flashsdk_plan* plan) {
  GuardedWorkspace workspace(flashsdk_plan_workspace_size(plan));
  const Workspace w = workspace.options().workspace;
  const flashsdk_status status = flashsdk_plan_launch(plan, w.data, w.size, nullptr);
  EXPECT_TRUE(workspace.guard_untouched());
  return status;
}

class Blocks {
 public:
  explicit Blocks(std::vector<std::uint8_t> blocks, int rows, int cols, int size) {
    flashsdk_block_lists* made = nullptr;
    EXPECT_EQ(flashsdk_block_lists_create(blocks.data(), 1, 1, rows, cols, size, size, &made), FLASHSDK_OK);
    lists.reset(made);
    mask.struct_size = sizeof mask;
    EXPECT_EQ(flashsdk_block_lists_mask(made, &mask), FLASHSDK_OK) << flashsdk_last_error();
  }
  std::unique_ptr<flashsdk_block_lists, Destroy> lists;
  flashsdk_block_mask mask{};
};

}  // namespace flashsdk::testing
