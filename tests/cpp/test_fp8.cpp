// float8_e4m3fn as kv_append writes it, against the format written a second time (host_tensor.h).
#include "common/fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "flashsdk/flashsdk.h"
#include "host_tensor.h"

namespace flashsdk::testing {
namespace {

float float_of(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

int expected(double x) { return encode_fp8(std::clamp(x, -448., 448.)); }

TEST(Fp8, EveryNumberStaysItself) {
  for (int code = 0; code < 256; ++code)
    if ((code & 0x7F) != 0x7F) {
      EXPECT_EQ(fp8_from_float(static_cast<float>(decode_fp8(static_cast<std::uint8_t>(code)))), code);
    }
}

TEST(Fp8, RoundsToTheNearest) {
  for (std::uint8_t code = 0; code < 0x7E; ++code) {
    const auto middle = static_cast<float>((decode_fp8(code) + decode_fp8(code + 1)) / 2);
    for (const float x : {std::nextafter(middle, 0.f), middle, std::nextafter(middle, 500.f)})
      for (const float y : {x, -x}) EXPECT_EQ(fp8_from_float(y), expected(y)) << y;
  }
  // Floats of every size, whose last bits are all zeros or all ones.
  for (std::uint32_t n = 0; n < 1u << 18; ++n) {
    const float x = float_of(n << 14 | (n % 2 != 0 ? 0x3FFFu : 0u));
    if (!std::isnan(x)) {
      ASSERT_EQ(fp8_from_float(x), expected(x)) << x;
    }
  }
}

TEST(Fp8, WhatIsTooLargeIsTheLargestAndNanHasOneCode) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float x : {448.f, 449.f, 464.f, 500.f, 3e38f, kInfinity}) {
    EXPECT_EQ(fp8_from_float(x), 0x7E);
    EXPECT_EQ(fp8_from_float(-x), 0xFE);
  }
  for (const std::uint32_t nan : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFC00000u, 0xFFFFFFFFu})
    EXPECT_EQ(fp8_from_float(float_of(nan)), 0x7F);
}

TEST(Fp8, AppendsDividedByTheDescaleOfSequenceAndHead) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    HostTensor k(dtype, {2, 3, 2, 8}), v(dtype, {2, 3, 2, 8});
    k.fill(3.);
    v.fill(-5.);
    HostTensor k_cache(DType::kFloat8E4M3, {2, 4, 2, 8}), v_cache(DType::kFloat8E4M3, {2, 4, 2, 8});
    k_cache.fill(0.);
    v_cache.fill(0.);
    std::int32_t used[] = {1, 0};
    float of_k[] = {0.5f, 1.f, 2.f, 7.f}, of_v[] = {-0.01f, 3.f};
    KvAppendArgs args;
    args.k_cache = k_cache.view();
    args.v_cache = v_cache.view();
    args.k = k.view();
    args.v = v.view();
    args.seqused_k = TensorView(used, DType::kInt32, {2});
    args.k_descale = TensorView(of_k, DType::kFloat32, {2, 2});
    args.v_descale = TensorView(of_v, DType::kFloat32, {1, 2});
    kv_append(args);
    const std::vector<std::uint8_t> keys = k_cache.bytes(), values = v_cache.bytes();
    for (int n = 0; n < 2 * 4 * 2 * 8; ++n) {
      const int head = n / 8 % 2, row = n / 16 % 4, b = n / 64;
      const bool is_new = row >= used[b] && row < used[b] + 3;
      EXPECT_EQ(keys[n], is_new ? expected(3.f / of_k[2 * b + head]) : 0) << n;
      EXPECT_EQ(values[n], is_new ? expected(-5.f / of_v[head]) : 0) << n;
    }
  }
}

}  // namespace
}  // namespace flashsdk::testing
