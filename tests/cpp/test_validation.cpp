// Bad input: one line that names the argument, what was given and what is allowed; the outputs stay as they were.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "flashsdk/flashsdk.h"
#include "problem.h"
#include "validate.h"

namespace flashsdk::testing {
namespace {

// What a call threw, as "code: message"; "" when it threw nothing.
template <class F>
std::string error_of(F call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << "more than one line: " << e.what();
    return to_string(e.code()) + std::string(": ") + e.what();
  }
  return "";
}

// One valid problem, and ways to spoil it.
class Validation : public ::testing::Test {
 protected:
  Validation()
      : batched_({.batch = 2,
                  .seqlen_q = 5,
                  .seqlen_k = 7,
                  .num_heads = 4,
                  .num_heads_kv = 2,
                  .head_dim = 8,
                  .head_dim_v = 16}),
        packed_({.num_heads = 4,
                 .num_heads_kv = 2,
                 .head_dim = 8,
                 .head_dim_v = 16,
                 .lengths_q = {5, 3},
                 .lengths_k = {7, 0}}),
        workspace_(std::size_t{64} << 20) {}

  using SpoilForward = std::function<void(ForwardArgs&)>;
  using SpoilBackward = std::function<void(BackwardArgs&)>;

  void forward(const std::string& expected, const SpoilForward& spoil) { check_forward(batched_, expected, spoil); }
  void packed_forward(const std::string& expected, const SpoilForward& spoil) {
    check_forward(packed_, expected, spoil);
  }
  void backward(const std::string& expected, const SpoilBackward& spoil) {
    BackwardArgs args = batched_.backward_args();
    spoil(args);
    const Problem before = batched_;
    EXPECT_EQ(error_of([&] { mha_bwd(args, workspace_.options()); }), expected);
    expect_untouched(batched_, before);
  }

  Problem batched_, packed_;
  GuardedWorkspace workspace_;

 private:
  void check_forward(Problem& problem, const std::string& expected, const SpoilForward& spoil) {
    ForwardArgs args = problem.forward_args();
    spoil(args);
    const Problem before = problem;
    EXPECT_EQ(error_of([&] {
                problem.shape().packed() ? mha_varlen_fwd(args, workspace_.options())
                                         : mha_fwd(args, workspace_.options());
              }),
              expected);
    expect_untouched(problem, before);
  }
  static void expect_untouched(const Problem& now, const Problem& before) {
    EXPECT_EQ(now.out.bytes(), before.out.bytes());
    EXPECT_EQ(now.lse.bytes(), before.lse.bytes());
    EXPECT_EQ(now.dq.bytes(), before.dq.bytes());
    EXPECT_EQ(now.dk.bytes(), before.dk.bytes());
    EXPECT_EQ(now.dv.bytes(), before.dv.bytes());
  }
};

TEST_F(Validation, TheProblemItselfIsValid) {
  EXPECT_EQ(error_of([&] { mha_fwd(batched_.forward_args(), workspace_.options()); }), "");
  EXPECT_EQ(error_of([&] { mha_bwd(batched_.backward_args(), workspace_.options()); }), "");
  EXPECT_EQ(error_of([&] { mha_varlen_fwd(packed_.forward_args(), workspace_.options()); }), "");
  EXPECT_EQ(error_of([&] { mha_varlen_bwd(packed_.backward_args(), workspace_.options()); }), "");
}

TEST_F(Validation, MissingTensors) {
  forward("invalid_argument: q: not given; a tensor", [](ForwardArgs& a) { a.q = {}; });
  forward("invalid_argument: k: not given; a tensor", [](ForwardArgs& a) { a.k = {}; });
  forward("invalid_argument: v: not given; a tensor", [](ForwardArgs& a) { a.v = {}; });
  forward("invalid_argument: out: not given; a tensor", [](ForwardArgs& a) { a.out = {}; });
  forward("invalid_argument: lse: not given; a tensor", [](ForwardArgs& a) { a.lse = {}; });
  backward("invalid_argument: dout: not given; a tensor", [](BackwardArgs& a) { a.dout = {}; });
  backward("invalid_argument: out: not given; a tensor", [](BackwardArgs& a) { a.out = {}; });
  backward("invalid_argument: lse: not given; a tensor", [](BackwardArgs& a) { a.lse = {}; });
  backward("invalid_argument: dq: not given; a tensor", [](BackwardArgs& a) { a.dq = {}; });
  backward("invalid_argument: dk: not given; a tensor", [](BackwardArgs& a) { a.dk = {}; });
  backward("invalid_argument: dv: not given; a tensor", [](BackwardArgs& a) { a.dv = {}; });
  forward("invalid_argument: q: a null pointer; the address of shape (2, 5, 4, 8)",
          [](ForwardArgs& a) { a.q.data = nullptr; });
}

TEST_F(Validation, KeysOf8Bits) {
  HostTensor k(DType::kFloat8E4M3, {2, 7, 2, 8}), v(DType::kFloat8E4M3, {2, 7, 2, 16});
  HostTensor packed_k(DType::kFloat8E4M3, {7, 2, 8}), packed_v(DType::kFloat8E4M3, {7, 2, 16});
  HostTensor of_heads(DType::kFloat32, {2, 2}), of_all(DType::kFloat32, {1, 1}), wrong(DType::kFloat32, {2, 4});
  HostTensor integers(DType::kInt32, {2, 2});
  const std::string allowed = "; (1 or batch 2, 1 or num_heads_kv 2)";
  forward(
      "invalid_argument: k: dtype float8_e4m3fn; float32, the dtype of q; beside float8_e4m3fn q is float16 or "
      "bfloat16",
      [&](ForwardArgs& a) { a.k = k.view(), a.v = v.view(); });
  forward("invalid_argument: v: dtype float8_e4m3fn; float32, the dtype of q", [&](ForwardArgs& a) { a.v = v.view(); });
  forward("invalid_argument: k_descale: given; none, as k is float32 and no float8_e4m3fn",
          [&](ForwardArgs& a) { a.k_descale = of_all.view(); });
  backward("invalid_argument: v_descale: given; none, as k is float32 and no float8_e4m3fn",
           [&](BackwardArgs& a) { a.v_descale = of_all.view(); });
  backward("unsupported: k: dtype float8_e4m3fn; the dtype of q, as float8_e4m3fn has no backward",
           [&](BackwardArgs& a) { a.k = k.view(), a.v = v.view(); });
  backward("unsupported: v: dtype float8_e4m3fn; the dtype of q, as float8_e4m3fn has no backward",
           [&](BackwardArgs& a) { a.v = v.view(); });

  batched_ = Problem(batched_.shape(), DType::kFloat16);
  packed_ = Problem(packed_.shape(), DType::kBFloat16);
  const auto narrow = [&](SpoilForward spoil) {
    return [&, spoil](ForwardArgs& a) {
      const bool packed = a.cu_seqlens_q.given();
      a.k = packed ? packed_k.view() : k.view();
      a.v = packed ? packed_v.view() : v.view();
      a.k_descale = of_heads.view();
      a.v_descale = of_all.view();
      spoil(a);
    };
  };
  ForwardArgs valid = batched_.forward_args();
  narrow([](ForwardArgs&) {})(valid);
  EXPECT_EQ(error_of([&] { mha_fwd(valid, workspace_.options()); }), "");
  forward("invalid_argument: v: dtype float16; float8_e4m3fn, the dtype of k",
          narrow([&](ForwardArgs& a) { a.v = batched_.v.view(); }));
  forward("invalid_argument: k_descale: shape (2, 4)" + allowed,
          narrow([&](ForwardArgs& a) { a.k_descale = wrong.view(); }));
  packed_forward("invalid_argument: v_descale: shape (2, 4)" + allowed,
                 narrow([&](ForwardArgs& a) { a.v_descale = wrong.view(); }));
  packed_forward("invalid_argument: k_descale: shape (2,)" + allowed,
                 narrow([&](ForwardArgs& a) { a.k_descale.rank = 1; }));
  forward("invalid_argument: v_descale: dtype int32; float32",
          narrow([&](ForwardArgs& a) { a.v_descale = integers.view(); }));
  forward("invalid_argument: k_descale: a null pointer; the address of shape (2, 2)",
          narrow([&](ForwardArgs& a) { a.k_descale.data = nullptr; }));
  forward("invalid_argument: k_descale: on cuda:0; cpu, where q is",
          narrow([&](ForwardArgs& a) { a.k_descale.device = {DeviceType::kCUDA, 0}; }));
  forward("invalid_argument: out: dtype float8_e4m3fn; float16, the dtype of q",
          narrow([&](ForwardArgs& a) { a.out.dtype = DType::kFloat8E4M3; }));
}

TEST_F(Validation, Ranks) {
  forward("invalid_argument: q: shape (2, 5, 4); (batch, seqlen_q, num_heads, head_dim)",
          [](ForwardArgs& a) { a.q.rank = 3; });
  forward("invalid_argument: q: rank 1000000; (batch, seqlen_q, num_heads, head_dim)",
          [](ForwardArgs& a) { a.q.rank = 1000000; });
  forward("invalid_argument: lse: rank -3; (batch 2, num_heads 4, seqlen_q 5)",
          [](ForwardArgs& a) { a.lse.rank = -3; });
  packed_forward("invalid_argument: k: shape (7, 2, 8, 0); (total_k, num_heads_kv, head_dim)",
                 [](ForwardArgs& a) { a.k.rank = 4; });
}

TEST_F(Validation, Shapes) {
  forward("invalid_argument: k: shape (3, 7, 2, 8); (batch 2, seqlen_k 7, num_heads_kv 2, head_dim 8)",
          [](ForwardArgs& a) { a.k.shape[0] = 3; });
  forward("invalid_argument: k: shape (2, 7, 2, 9); (batch 2, seqlen_k 7, num_heads_kv 2, head_dim 8)",
          [](ForwardArgs& a) { a.k.shape[3] = 9; });
  forward("invalid_argument: v: shape (2, 6, 2, 16); (batch 2, seqlen_k 7, num_heads_kv 2, head_dim_v 16)",
          [](ForwardArgs& a) { a.v.shape[1] = 6; });
  forward("invalid_argument: out: shape (2, 5, 4, 15); (batch 2, seqlen_q 5, num_heads 4, head_dim_v 16)",
          [](ForwardArgs& a) { a.out.shape[3] = 15; });
  forward("invalid_argument: lse: shape (2, 5, 4); (batch 2, num_heads 4, seqlen_q 5)",
          [](ForwardArgs& a) { a.lse = TensorView(a.lse.data, DType::kFloat32, {2, 5, 4}); });
  forward("invalid_argument: q: shape (2, -5, 4, 8); (batch, seqlen_q, num_heads, head_dim)",
          [](ForwardArgs& a) { a.q.shape[1] = -5; });
  backward("invalid_argument: dk: shape (2, 7, 4, 8); (batch 2, seqlen_k 7, num_heads_kv 2, head_dim 8)",
           [](BackwardArgs& a) { a.dk.shape[2] = 4; });
  backward("invalid_argument: dlse: shape (2, 4, 6); (batch 2, num_heads 4, seqlen_q 5)",
           [](BackwardArgs& a) { a.dlse = TensorView(a.lse.data, DType::kFloat32, {2, 4, 6}); });
}

TEST_F(Validation, HeadCounts) {
  forward("invalid_argument: k: num_heads_kv 3; a divisor of num_heads, which is 4",
          [](ForwardArgs& a) { a.k.shape[2] = 3; });
  forward("invalid_argument: k: num_heads_kv 0; 1 to 1073741824", [](ForwardArgs& a) { a.k.shape[2] = 0; });
  forward("invalid_argument: q: num_heads 0; 1 to 1073741824", [](ForwardArgs& a) { a.q.shape[2] = 0; });
}

TEST_F(Validation, Sizes) {
  forward("invalid_argument: q: head_dim 0; 1 to 576", [](ForwardArgs& a) { a.q.shape[3] = a.k.shape[3] = 0; });
  forward("unsupported: q: head_dim 577; 1 to 576", [](ForwardArgs& a) { a.q.shape[3] = 577; });
  forward("unsupported: v: head_dim_v 600; 1 to 576", [](ForwardArgs& a) { a.v.shape[3] = 600; });
  forward("unsupported: q: seqlen_q 1073741825; 0 to 1073741824", [](ForwardArgs& a) { a.q.shape[1] = 1073741825; });
  forward("unsupported: q: batch * num_heads = 4294967296; 0 to 1073741824",
          [](ForwardArgs& a) { a.q.shape[0] = 1 << 30; });
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  forward("unsupported: q: batch 9223372036854775807; 0 to 1073741824", [](ForwardArgs& a) { a.q.shape[0] = kHuge; });
  forward(
      "invalid_argument: q: shape (2, 5, 4, 8), strides of elements (9223372036854775807, 32, 8, 1); a tensor that "
      "fits in memory",
      [](ForwardArgs& a) { a.q.stride[0] = kHuge; });
}

TEST(HeadDims, AreOfADevice) {
  const Device cpu{DeviceType::kCPU, 0}, gpu{DeviceType::kCUDA, 0};
  const auto message = [](auto check, std::int64_t head_dim, Operation operation, Device device) {
    try {
      check("q", head_dim, operation, device);
    } catch (const Error& e) {
      return to_string(e.code()) + std::string(": ") + e.what();
    }
    return std::string();
  };
  for (const Operation operation : {Operation::kForward, Operation::kBackward, Operation::kAppend}) {
    EXPECT_EQ(message(check_head_dim, 576, operation, cpu), "");
    EXPECT_EQ(message(check_head_dim_v, 576, operation, cpu), "");
    EXPECT_EQ(message(check_head_dim, 512, operation, gpu), "");
    EXPECT_EQ(message(check_head_dim_v, 512, operation, gpu), "");
    EXPECT_EQ(message(check_head_dim, 0, operation, cpu), "invalid_argument: q: head_dim 0; 1 to 576");
  }
  EXPECT_EQ(message(check_head_dim, 576, Operation::kForward, gpu), "");
  EXPECT_EQ(message(check_head_dim, 577, Operation::kForward, gpu), "unsupported: q: head_dim 577; 1 to 576");
  EXPECT_EQ(message(check_head_dim_v, 513, Operation::kForward, gpu),
            "unsupported: q: head_dim_v 513; 1 to 512 on a GPU, to 576 on a CPU");
  EXPECT_EQ(message(check_head_dim, 576, Operation::kBackward, gpu),
            "unsupported: q: head_dim 576; 1 to 512 in the backward on a GPU, to 576 on a CPU");
  EXPECT_EQ(message(check_head_dim, 577, Operation::kBackward, gpu), "unsupported: q: head_dim 577; 1 to 512");
  EXPECT_EQ(message(check_head_dim, 0, Operation::kBackward, gpu), "invalid_argument: q: head_dim 0; 1 to 512");
  EXPECT_EQ(message(check_head_dim, 576, Operation::kAppend, gpu), "");
}

TEST_F(Validation, DTypes) {
  forward("invalid_argument: q: dtype int32; float32, float16 or bfloat16",
          [](ForwardArgs& a) { a.q.dtype = DType::kInt32; });
  forward("invalid_argument: q: dtype unknown; float32, float16 or bfloat16",
          [](ForwardArgs& a) { a.q.dtype = static_cast<DType>(99); });
  forward("invalid_argument: k: dtype bfloat16; float32, the dtype of q",
          [](ForwardArgs& a) { a.k.dtype = DType::kBFloat16; });
  forward("invalid_argument: out: dtype float16; float32, the dtype of q",
          [](ForwardArgs& a) { a.out.dtype = DType::kFloat16; });
  forward("invalid_argument: lse: dtype bfloat16; float32", [](ForwardArgs& a) { a.lse.dtype = DType::kBFloat16; });
  backward("invalid_argument: dv: dtype bool; float32, the dtype of q",
           [](BackwardArgs& a) { a.dv.dtype = DType::kBool; });
}

TEST_F(Validation, Devices) {
  if (build_info().cuda) GTEST_SKIP() << "this build has CUDA";
  forward("unsupported: q: on cuda:1; cpu, as this build has no CUDA kernels (build flashsdk with FLASHSDK_CUDA=ON)",
          [](ForwardArgs& a) { a.q.device = {DeviceType::kCUDA, 1}; });
  forward("invalid_argument: v: on cuda:0; cpu, where q is",
          [](ForwardArgs& a) { a.v.device = {DeviceType::kCUDA, 0}; });
  forward("invalid_argument: q: on device type unknown:0; cpu or cuda",
          [](ForwardArgs& a) { a.q.device = {static_cast<DeviceType>(9), 0}; });
}

TEST_F(Validation, DataWithoutDimensions) {
  float one = 1.f;
  forward("invalid_argument: bias: shape (); (1 or batch 2, 1 or num_heads 4, 1 or seqlen_q 5, 1 or seqlen_k 7)",
          [&](ForwardArgs& a) { a.bias = TensorView(&one, DType::kFloat32, {}); });
}

TEST_F(Validation, Strides) {
  forward(
      "invalid_argument: v: strides of elements (224, 32, 16, 2); the last dimension contiguous (stride 1), as in a "
      "contiguous copy",
      [](ForwardArgs& a) { a.v.stride[3] = 2; });
  forward(
      "invalid_argument: q: strides of elements (160, 32, 8, 0); the last dimension contiguous (stride 1), as in a "
      "contiguous copy",
      [](ForwardArgs& a) { a.q.stride[3] = 0; });
  forward(
      "invalid_argument: out: shape (2, 5, 4, 16), strides of elements (320, 0, 16, 1); an output whose elements do "
      "not share "
      "memory",
      [](ForwardArgs& a) { a.out.stride[1] = 0; });
  forward("invalid_argument: q: its address is not a multiple of 4; aligned float32",
          [](ForwardArgs& a) { a.q.data = static_cast<char*>(a.q.data) + 2; });
}

TEST_F(Validation, Overlaps) {
  // q is looked at first: what lies behind it on the heap does not matter.
  forward("invalid_argument: out: overlaps q; memory of its own",
          [](ForwardArgs& a) { a.out.data = static_cast<float*>(a.q.data) + 100; });
  forward("invalid_argument: out: overlaps lse; memory of its own", [](ForwardArgs& a) { a.lse.data = a.out.data; });
  backward("invalid_argument: dq: overlaps q; memory of its own", [](BackwardArgs& a) { a.dq = a.q; });
  backward("invalid_argument: dk: overlaps dv; memory of its own", [](BackwardArgs& a) { a.dk.data = a.dv.data; });
}

TEST_F(Validation, SlicesOfOneArrayDoNotOverlap) {
  // q, k, v and out interleaved in one array, as a fused projection leaves them.
  HostTensor fused(DType::kFloat32, {2, 5, 4, 4, 8});
  fused.fill(1);
  ForwardArgs args = batched_.forward_args();
  TensorView* slices[] = {&args.q, &args.k, &args.v, &args.out};
  for (int n = 0; n < 4; ++n) {
    TensorView view = fused.view();  // (batch, seqlen, tensor, num_heads, head_dim)
    view.data = static_cast<float*>(view.data) + n * 32;
    view.rank = 4;
    view.shape = {2, 5, 4, 8};
    view.stride = {view.stride[0], view.stride[1], 8, 1};
    *slices[n] = view;
  }
  EXPECT_EQ(error_of([&] { mha_fwd(args, workspace_.options()); }), "");
}

TEST_F(Validation, Numbers) {
  const float nan = std::nanf(""), inf = INFINITY;
  forward("invalid_argument: softmax_scale: nan; a finite number", [&](ForwardArgs& a) { a.softmax_scale = nan; });
  forward("invalid_argument: softmax_scale: -inf; a finite number", [&](ForwardArgs& a) { a.softmax_scale = -inf; });
  forward("invalid_argument: softcap: -1; a finite number >= 0", [](ForwardArgs& a) { a.softcap = -1; });
  forward("invalid_argument: softcap: nan; a finite number >= 0", [&](ForwardArgs& a) { a.softcap = nan; });
  forward("invalid_argument: softcap: inf; a finite number >= 0", [&](ForwardArgs& a) { a.softcap = inf; });
  // What float32 makes another number of.
  forward("invalid_argument: softmax_scale: -1e+300; a number that float32 can hold",
          [](ForwardArgs& a) { a.softmax_scale = -1e300; });
  forward("invalid_argument: softcap: 1e+300; a number that float32 can hold",
          [](ForwardArgs& a) { a.softcap = 1e300; });
  forward("invalid_argument: softcap: 1e-300; 0, or a number that float32 can hold",
          [](ForwardArgs& a) { a.softcap = 1e-300; });
  forward("invalid_argument: dropout_p: -1e-300; 0 <= dropout_p < 1", [](ForwardArgs& a) { a.dropout_p = -1e-300; });
  forward("invalid_argument: dropout_p: -0.1; 0 <= dropout_p < 1", [](ForwardArgs& a) { a.dropout_p = -0.1f; });
  forward("invalid_argument: dropout_p: 1; 0 <= dropout_p < 1", [](ForwardArgs& a) { a.dropout_p = 1; });
  forward("invalid_argument: dropout_p: -0.5; 0 <= dropout_p < 1", [](ForwardArgs& a) { a.dropout_p = -0.5f; });
  forward("invalid_argument: dropout_p: nan; 0 <= dropout_p < 1", [&](ForwardArgs& a) { a.dropout_p = nan; });
}

TEST_F(Validation, BiasAndSlopes) {
  HostTensor bias(DType::kFloat32, {2, 4, 5, 7}), wrong(DType::kFloat32, {2, 3, 5, 7}),
      ints(DType::kInt32, {1, 1, 5, 7});
  forward(
      "invalid_argument: bias: shape (2, 3, 5, 7); (1 or batch 2, 1 or num_heads 4, 1 or seqlen_q 5, 1 or seqlen_k 7)",
      [&](ForwardArgs& a) { a.bias = wrong.view(); });
  forward("invalid_argument: bias: dtype int32; float32, float16, bfloat16 or bool",
          [&](ForwardArgs& a) { a.bias = ints.view(); });
  forward(
      "invalid_argument: bias: strides of elements (140, 35, 7, 3); the last dimension contiguous (stride 1), as in a "
      "contiguous copy",
      [&](ForwardArgs& a) {
        a.bias = bias.view();
        a.bias.stride[3] = 3;
      });
  HostTensor slopes(DType::kFloat32, {4}), five(DType::kFloat32, {5}), halves(DType::kFloat16, {4});
  forward("invalid_argument: alibi_slopes: shape (5,); (num_heads 4)",
          [&](ForwardArgs& a) { a.alibi_slopes = five.view(); });
  forward("invalid_argument: alibi_slopes: dtype float16; float32",
          [&](ForwardArgs& a) { a.alibi_slopes = halves.view(); });
  HostTensor words(DType::kUInt64, {2}), three(DType::kInt64, {3}), each(DType::kInt64, {7, 2});
  forward("invalid_argument: seed: shape (3,); (seed and offset = 2)",
          [&](ForwardArgs& a) { a.seed_tensor = three.view(); });
  forward("invalid_argument: seed: shape (7, 2); (batch 2, seed and offset = 2)",
          [&](ForwardArgs& a) { a.seed_tensor = each.view(); });
  forward("invalid_argument: seed: dtype int32; int64 or uint64", [&](ForwardArgs& a) {
    a.seed_tensor = words.view();
    a.seed_tensor.dtype = DType::kInt32;
  });
}

TEST_F(Validation, PackedSequences) {
  auto cu = [](std::vector<int> values) {
    HostTensor t(DType::kInt32, {static_cast<std::int64_t>(values.size())});
    for (std::int64_t n = 0; n < t.view().shape[0]; ++n) store(t.view(), Index{n}, values[n]);
    return t;
  };
  const HostTensor down = cu({0, 5, 4}), past = cu({0, 5, 9}), late = cu({1, 5, 8}), three = cu({0, 1, 2, 3}),
                   negative = cu({0, -1, 8});
  packed_forward("invalid_argument: cu_seqlens_q: 5 before 4; ascending",
                 [&](ForwardArgs& a) { a.cu_seqlens_q = down.view(); });
  packed_forward("invalid_argument: cu_seqlens_q: 0 before -1; ascending",
                 [&](ForwardArgs& a) { a.cu_seqlens_q = negative.view(); });
  packed_forward("invalid_argument: cu_seqlens_q: ends with 9; at most total_q 8",
                 [&](ForwardArgs& a) { a.cu_seqlens_q = past.view(); });
  packed_forward("invalid_argument: cu_seqlens_k: ends with 9; at most total_k 7",
                 [&](ForwardArgs& a) { a.cu_seqlens_k = past.view(); });
  packed_forward("invalid_argument: cu_seqlens_q: begins with 1; 0",
                 [&](ForwardArgs& a) { a.cu_seqlens_q = late.view(); });
  packed_forward("invalid_argument: cu_seqlens_k: shape (4,); (batch + 1 = 3)",
                 [&](ForwardArgs& a) { a.cu_seqlens_k = three.view(); });
  packed_forward("invalid_argument: max_seqlen_q: 4; at least the longest sequence, 5",
                 [](ForwardArgs& a) { a.max_seqlen_q = 4; });
  packed_forward("invalid_argument: max_seqlen_k: -1; 0 to 1073741824", [](ForwardArgs& a) { a.max_seqlen_k = -1; });
  packed_forward("invalid_argument: cu_seqlens_k: not given; a tensor", [](ForwardArgs& a) { a.cu_seqlens_k = {}; });
  forward("invalid_argument: max_seqlen_q: 5; 0, as cu_seqlens_q and cu_seqlens_k are not given",
          [](ForwardArgs& a) { a.max_seqlen_q = 5; });
  backward("invalid_argument: max_seqlen_k: 7; 0, as cu_seqlens_q and cu_seqlens_k are not given",
           [](BackwardArgs& a) { a.max_seqlen_k = 7; });
  HostTensor floats(DType::kFloat32, {3});
  packed_forward("invalid_argument: cu_seqlens_q: dtype float32; int32",
                 [&](ForwardArgs& a) { a.cu_seqlens_q = floats.view(); });
}

TEST_F(Validation, Layouts) {
  const std::vector<std::uint8_t> full{1};
  const auto storage = BlockMaskStorage::from_dense(full.data(), 1, 1, 1, 1, 16, 16, Causal());
  auto spoilt = [&](auto spoil) {
    return [&storage, spoil](auto& args) {
      BlockMask mask = storage.view();
      spoil(mask);
      args.mask = mask;
    };
  };
  const std::vector<std::uint8_t> many(8, 1);
  const auto rows = BlockMaskStorage::from_dense(many.data(), 1, 1, 2, 1, 16, 16);
  const auto batches = BlockMaskStorage::from_dense(many.data(), 3, 1, 1, 1, 16, 16);
  forward(
      "invalid_argument: mask.row_partial.offsets: shape (1, 1, 3); (1 or batch 2, 1 or num_heads 4, blocks + 1 = 2)",
      [&](ForwardArgs& a) { a.mask = rows.view(); });
  forward("invalid_argument: mask: a layout of batch 3; batch 1 or 2",
          [&](ForwardArgs& a) { a.mask = batches.view(); });
  forward("invalid_argument: mask.block_q: 24; a positive multiple of 16, at most 16777216",
          spoilt([](BlockMask& m) { m.block_q = 24; }));
  forward("invalid_argument: mask.block_k: 0; a positive multiple of 16, at most 16777216",
          spoilt([](BlockMask& m) { m.block_k = 0; }));
  forward("invalid_argument: mask.row_full.indices: not given; a tensor",
          spoilt([](BlockMask& m) { m.row_full.indices = {}; }));
  backward("invalid_argument: mask.col_full.offsets: not given; a tensor",
           spoilt([](BlockMask& m) { m.col_full.offsets = {}; }));

  const HostTensor far = [] {
    HostTensor t(DType::kInt32, {1});
    return t.fill(1);
  }();
  HostTensor offsets(DType::kInt32, {1, 1, 2});
  store(offsets.view(), {0, 0, 0}, 0);
  store(offsets.view(), {0, 0, 1}, 5);
  forward("invalid_argument: mask.row_full.indices: 1; 0 to 0",
          spoilt([&](BlockMask& m) { m.row_full.indices = far.view(); }));
  forward("invalid_argument: mask.row_full.offsets: 0, 5 around line 0; ascending from 0 to the 1 indices",
          spoilt([&](BlockMask& m) { m.row_full.offsets = offsets.view(); }));
  forward("invalid_argument: mask.row_partial.indices: block 0 is in mask.row_full.indices too; each block once",
          spoilt([](BlockMask& m) { m.row_partial = m.row_full; }));
  backward("invalid_argument: mask.col_partial.indices: block 0 is in mask.col_full.indices too; each block once",
           spoilt([](BlockMask& m) { m.col_partial = m.col_full; }));
}

// Two blocks, on the diagonal: rows and columns have the same lists.
struct TwoRows {
  std::int32_t offsets[3] = {0, 1, 2}, empty_offsets[3] = {0, 0, 0}, indices[2] = {0, 1};
  BlockMask view() {
    const BlockLists full{TensorView(offsets, DType::kInt32, {1, 1, 3}), TensorView(indices, DType::kInt32, {2})};
    const BlockLists none{TensorView(empty_offsets, DType::kInt32, {1, 1, 3}), TensorView(indices, DType::kInt32, {0})};
    BlockMask mask;
    mask.block_q = mask.block_k = 16;
    mask.row_full = mask.col_full = full;
    mask.row_partial = mask.col_partial = none;
    return mask;
  }
};

TEST_F(Validation, ALayoutIsCheckedWhereItIsMade) {
  TwoRows lists;
  const auto refused = [&](auto spoil) {
    BlockMask mask = lists.view();
    spoil(mask);
    return error_of([&] { CheckedBlockMask{mask}; });
  };
  EXPECT_EQ(refused([](BlockMask&) {}), "");
  EXPECT_EQ(refused([](BlockMask& m) { m.block_k = 0; }),
            "invalid_argument: mask.block_k: 0; a positive multiple of 16, at most 16777216");
  EXPECT_EQ(refused([](BlockMask& m) { m.col_full.offsets = {}; }),
            "invalid_argument: mask.col_full.offsets: not given; a tensor");
  EXPECT_EQ(refused([](BlockMask& m) { m.row_partial.indices = {}; }),
            "invalid_argument: mask.row_partial.indices: not given; a tensor");
  EXPECT_EQ(refused([](BlockMask& m) { m.row_full.indices.device = {DeviceType::kCUDA, 1}; }),
            "invalid_argument: mask.row_full.indices: on cuda:1; cpu");
  EXPECT_EQ(refused([](BlockMask& m) { m.row_full.offsets.shape[2] = 0; }),
            "invalid_argument: mask.row_full.offsets: blocks + 1 = 0; 1 to 67108864");
  EXPECT_EQ(refused([](BlockMask& m) { m.row_full.offsets.rank = 2; }),
            "invalid_argument: mask.row_full.offsets: shape (1, 1); (batch, num_heads, blocks + 1)");
  EXPECT_EQ(refused([](BlockMask& m) { m.seqlen_q = -1; }), "invalid_argument: mask.seqlen_q: -1; 0 to 1073741824");
  EXPECT_EQ(refused([](BlockMask& m) { m.seqlen_k = 33; }),
            "invalid_argument: mask.col_partial.offsets: shape (1, 1, 3); (1 or batch 1, 1 or num_heads 1, blocks + 1 "
            "= 4)");
  EXPECT_EQ(refused([](BlockMask& m) { m.row_full.offsets.shape[1] = 1 << 30 | 1; }),
            "unsupported: mask: num_heads 1073741825; 0 to 1073741824");
  EXPECT_EQ(refused([](BlockMask& m) { m.col_full = m.col_partial; }),
            "invalid_argument: mask.col_full.indices: shape (0,); the 2 blocks of the rows");
  std::int32_t swapped[] = {1, 0};
  EXPECT_EQ(refused([&](BlockMask& m) { m.col_full.indices.data = swapped; }),
            "invalid_argument: mask.col_full.indices: no block 0 in column 0; the transpose of mask.row_full.indices");
}

TEST_F(Validation, ACheckedLayoutIsNotReadAgain) {
  Problem two_rows({.seqlen_q = 20, .seqlen_k = 32}), longer({.seqlen_q = 20, .seqlen_k = 33});
  TwoRows lists;
  const BlockMask raw = lists.view();
  const CheckedBlockMask checked(raw);
  const auto asked = [](Problem& p, const Mask& mask) {
    p.options.mask = mask;
    const std::string fwd = error_of([&] { validate(p.forward_args()); });
    EXPECT_EQ(error_of([&] { validate(p.backward_args()); }), fwd);
    return fwd;
  };
  EXPECT_EQ(asked(two_rows, raw), "");
  EXPECT_EQ(asked(two_rows, checked), "");
  // Who changes lists that are in use is found out where they are read.
  lists.indices[0] = 2;
  const std::string wrong = "invalid_argument: mask.row_full.indices: 2; 0 to 1";
  EXPECT_EQ(asked(two_rows, raw), wrong);
  EXPECT_EQ(asked(two_rows, checked), "");
  // A forward looks at no columns: rows alone say for how many keys they are, and here block 2 is one.
  longer.options.mask = checked;
  EXPECT_EQ(error_of([&] { validate(longer.forward_args()); }), "");
  lists.indices[0] = 3;
  EXPECT_EQ(error_of([&] { validate(longer.forward_args()); }),
            "invalid_argument: mask.row_full.indices: 3; 0 to 2");  // of other lengths they are read
  // What a call decides is asked of each.
  Problem taller({.seqlen_q = 33, .seqlen_k = 32});
  EXPECT_EQ(asked(taller, checked),
            "invalid_argument: mask.row_partial.offsets: shape (1, 1, 3); (1 or batch 1, 1 or num_heads 2, blocks + 1 "
            "= 4)");
}

TEST_F(Validation, Backends) {
  forward("invalid_argument: backend: gpu; \"cpu\", \"sm80\", \"sm90\" or none",
          [](ForwardArgs& a) { a.backend = "gpu"; });
  forward("invalid_argument: backend: two lines; \"cpu\", \"sm80\", \"sm90\" or none",
          [](ForwardArgs& a) { a.backend = "two\nlines"; });
  forward("invalid_argument: backend: " + std::string(79, 'x') + "…; \"cpu\", \"sm80\", \"sm90\" or none",
          [](ForwardArgs& a) { a.backend = std::string(79, 'x') + "µ" + std::string(99, 'x'); });
  forward("invalid_argument: backend: sm90; cpu, as q is on cpu", [](ForwardArgs& a) { a.backend = "sm90"; });
  EXPECT_EQ(error_of([&] {
              ForwardArgs args = batched_.forward_args();
              args.backend = "cpu";
              mha_fwd(args, workspace_.options());
            }),
            "");
}

}  // namespace
}  // namespace flashsdk::testing
