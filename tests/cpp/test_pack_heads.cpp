// Query heads of a group as rows of one head: when, and what the kernels are told then.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "flashsdk/flashsdk.h"
#include "pack_heads.h"
#include "problem.h"
#include "validate.h"

namespace flashsdk::testing {
namespace {

const Shape kDecoding{
    // not constexpr, as GCC 11's std::string is not
    .batch = 3, .seqlen_q = 1, .seqlen_k = 50, .num_heads = 8, .num_heads_kv = 2, .head_dim = 16, .head_dim_v = 24};
constexpr const char* kPacking = "query heads packed: 4 rows a head of keys";

std::string forward_packing(const Problem& p) { return explain(p.forward_args()).packing; }
std::string backward_packing(const Problem& p) { return explain(p.backward_args()).packing; }

TEST(PackHeads, HeadsOfAGroupBecomeRows) {
  Problem p(kDecoding, DType::kFloat32, Layout::kPadded);
  p.bias = HostTensor(DType::kFloat32, {3, 8, 1, 50});
  p.with_dlse = true;
  const BackwardParams asked = validate(p.backward_args()), taken = pack_query_heads(asked);
  EXPECT_EQ(taken.num_heads, 2);
  EXPECT_EQ(taken.num_heads_kv, 2);
  EXPECT_EQ(taken.seqlen_q, 4);
  EXPECT_EQ(taken.seqlen_k, 50);
  // Every element is where it was: of batch b, row r of head h was head 4·h + r.
  using Rows = TensorParam BackwardParams::*;
  for (const Rows t :
       {Rows(&BackwardParams::q), Rows(&BackwardParams::out), &BackwardParams::dout, &BackwardParams::dq}) {
    EXPECT_EQ((taken.*t).ptr, (asked.*t).ptr);
    EXPECT_EQ((taken.*t).batch, (asked.*t).batch);
    EXPECT_EQ((taken.*t).head, 4 * (asked.*t).head);
    EXPECT_EQ((taken.*t).row, (asked.*t).head);
  }
  using PerQuery = RowParam BackwardParams::*;
  for (const PerQuery t : {PerQuery(&BackwardParams::lse), &BackwardParams::dlse}) {
    EXPECT_EQ((taken.*t).batch, (asked.*t).batch);
    EXPECT_EQ((taken.*t).head, 4 * (asked.*t).head);
    EXPECT_EQ((taken.*t).row, (asked.*t).head);
  }
  EXPECT_EQ(taken.score.bias.head, 200);
  EXPECT_EQ(taken.score.bias.row, 50);
  for (const Rows t : {Rows(&BackwardParams::k), Rows(&BackwardParams::v), &BackwardParams::dk, &BackwardParams::dv}) {
    EXPECT_EQ((taken.*t).head, (asked.*t).head);
    EXPECT_EQ((taken.*t).row, (asked.*t).row);
  }
}

TEST(PackHeads, AWindowCutsTheKeys) {
  Problem p(kDecoding, DType::kBFloat16);
  p.bias = HostTensor(DType::kBool, {1, 1, 1, 50});
  struct Case {
    Mask mask;
    int first, keys;
  };
  for (const Case& c : {Case{SlidingWindow(9, 0), 40, 10}, Case{SlidingWindow(60, -30), 0, 20},
                        Case{SlidingWindow(-5, 7, Alignment::kTopLeft), 5, 3}, Case{Causal(Alignment::kTopLeft), 0, 1},
                        Case{SlidingWindow(0, std::nullopt), 49, 1}}) {
    p.options.mask = c.mask;
    const ForwardParams asked = validate(p.forward_args()), taken = pack_query_heads(asked);
    EXPECT_EQ(asked.mask.kind, MaskKind::kBand);
    EXPECT_EQ(taken.mask.kind, MaskKind::kDense);
    EXPECT_EQ(taken.num_heads, 2);
    EXPECT_EQ(taken.seqlen_k, c.keys);
    EXPECT_EQ(taken.k.ptr, static_cast<char*>(asked.k.ptr) + c.first * 2 * 16 * 2);
    EXPECT_EQ(taken.v.ptr, static_cast<char*>(asked.v.ptr) + c.first * 2 * 24 * 2);
    EXPECT_EQ(taken.score.bias.ptr, static_cast<const char*>(asked.score.bias.ptr) + c.first);
  }
}

// A slice of keys of 8 bits begins where that key lies, and factors stay those of their heads.
TEST(PackHeads, AWindowCutsKeysOf8Bits) {
  Problem p(kDecoding, DType::kBFloat16);
  p.k = HostTensor(DType::kFloat8E4M3, {3, 50, 2, 16});
  p.v = HostTensor(DType::kFloat8E4M3, {3, 50, 2, 24});
  HostTensor k_descale(DType::kFloat32, {3, 2}), v_descale(DType::kFloat32, {1, 2});
  p.options.mask = SlidingWindow(9, 0);
  p.options.k_descale = k_descale.view();
  p.options.v_descale = v_descale.view();
  const ForwardParams asked = validate(p.forward_args()), taken = pack_query_heads(asked);
  EXPECT_EQ(taken.seqlen_k, 10);
  EXPECT_EQ(taken.k.ptr, static_cast<char*>(asked.k.ptr) + 40 * 2 * 16);
  EXPECT_EQ(taken.v.ptr, static_cast<char*>(asked.v.ptr) + 40 * 2 * 24);
  EXPECT_EQ(taken.dtype_kv, DType::kFloat8E4M3);
  EXPECT_EQ(taken.k_descale.batch, 2);
  EXPECT_EQ(taken.k_descale.head, 1);
  EXPECT_EQ(taken.v_descale.batch, 0);
  EXPECT_EQ(taken.v_descale.head, 1);
}

TEST(PackHeads, ExplainSaysSo) {
  Problem p(kDecoding);
  EXPECT_EQ(forward_packing(p), kPacking);
  EXPECT_EQ(backward_packing(p), kPacking);
  const std::vector<std::function<void(Problem&)>> harmless{
      [](Problem& x) { x.options.mask = Causal(); },
      [](Problem& x) { x.options.mask = SlidingWindow(49, 0); },
      [](Problem& x) { x.options.softcap = 5; },
      [](Problem& x) { x.options.dropout_p = 1e-9f; },  // rounds to 0
      [](Problem& x) { x.bias = HostTensor(DType::kFloat32, {1, 8, 1, 1}); },
  };
  for (std::size_t n = 0; n < harmless.size(); ++n) {
    Problem changed = p;
    harmless[n](changed);
    EXPECT_EQ(forward_packing(changed), kPacking) << n;
    EXPECT_EQ(backward_packing(changed), kPacking) << n;
  }
}

TEST(PackHeads, NotWhereHeadsDifferInMoreThanTheirPlace) {
  const auto storage = [] {
    const std::vector<std::uint8_t> blocks(1, 1);
    return BlockMaskStorage::from_dense(blocks.data(), 1, 1, 1, 1, 16, 64);
  }();
  const std::vector<std::function<void(Problem&)>> reasons{
      [](Problem& x) { x.options.dropout_p = 0.25f; },
      [](Problem& x) { x.alibi = HostTensor(DType::kFloat32, {8}); },
      [&](Problem& x) { x.options.mask = storage.view(); },
      [](Problem& x) { x.options.mask = SlidingWindow(-3, 2); },  // sees nothing
  };
  for (std::size_t n = 0; n < reasons.size(); ++n) {
    Problem changed(kDecoding);
    reasons[n](changed);
    EXPECT_EQ(forward_packing(changed), "") << n;
    EXPECT_EQ(backward_packing(changed), "") << n;
  }
}

TEST(PackHeads, NotWithoutGroupsNorWithMoreQueriesNorPackedSequences) {
  Shape shape = kDecoding;
  shape.num_heads_kv = 8;
  EXPECT_EQ(forward_packing(Problem(shape)), "");
  shape = kDecoding;
  shape.seqlen_q = 2;
  EXPECT_EQ(forward_packing(Problem(shape)), "");
  shape.seqlen_q = 0;
  EXPECT_EQ(forward_packing(Problem(shape)), "");
  shape = kDecoding;
  shape.lengths_q = {1, 1, 1};
  shape.lengths_k = {50, 50, 50};
  EXPECT_EQ(forward_packing(Problem(shape)), "");
  EXPECT_EQ(backward_packing(Problem(shape)), "");
}

// Keys outside of a window get gradients of zero from the kernel that knows the window.
TEST(PackHeads, NotTheBackwardOfAWindow) {
  Problem p(kDecoding);
  p.options.mask = SlidingWindow(9, 0);
  EXPECT_EQ(forward_packing(p), kPacking);
  EXPECT_EQ(backward_packing(p), "");
}

TEST(PackHeads, MultiQueryPacksAllHeads) {
  Shape shape = kDecoding;
  shape.num_heads_kv = 1;
  EXPECT_EQ(forward_packing(Problem(shape)), "query heads packed: 8 rows a head of keys");
}

}  // namespace
}  // namespace flashsdk::testing
