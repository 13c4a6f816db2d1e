// A tensor on the host that owns its memory, in any dtype and any layout the library takes, and notices stray writes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "flashsdk/tensor.h"

namespace flashsdk::testing {

// 16-bit floats, spelt out with ldexp and nearbyint: slow, and independent of the kernels' conversions.
struct HalfFormat {
  int mantissa_bits, exponent_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }

  double decode(std::uint16_t bits) const {
    const double sign = bits >> 15 != 0 ? -1 : 1;
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
  }
  // To the nearest, ties to even.
  std::uint16_t encode(double x) const {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const std::uint16_t infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
    if (std::isnan(x)) return sign | infinity | (1 << (mantissa_bits - 1));
    if (std::isinf(x)) return sign | infinity;
    if (x == 0) return sign;
    int exponent = 0;
    std::frexp(x, &exponent);
    const int ulp = std::max(exponent - 1, 1 - bias()) - mantissa_bits;  // of the result's binade
    const double steps = std::nearbyint(std::ldexp(std::fabs(x), -ulp));
    // Counting steps from the start of the subnormals carries into the exponent by itself.
    const double bits = steps + std::ldexp(ulp - (1 - bias() - mantissa_bits), mantissa_bits);
    return sign | static_cast<std::uint16_t>(std::min<double>(bits, infinity));
  }
};
inline constexpr HalfFormat kFp16{10, 5}, kBf16{7, 8};

// float8_e4m3fn has no infinity: its largest codes are NaN, and those below them numbers.
inline double decode_fp8(std::uint8_t bits) {
  const double sign = bits >> 7 != 0 ? -1 : 1;
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}
// The nearest, of two the one with an even code; beyond 448 NaN.
inline std::uint8_t encode_fp8(double x) {
  const std::uint8_t sign = std::signbit(x) ? 0x80 : 0;
  std::uint8_t best = 0x7F;
  for (std::uint8_t code = 0; code < 0x7F && std::fabs(x) <= 464; ++code) {
    const double error = std::fabs(decode_fp8(code) - std::fabs(x));
    const double least = best == 0x7F ? INFINITY : std::fabs(decode_fp8(best) - std::fabs(x));
    if (error < least || (error == least && code % 2 == 0)) best = code;
  }
  return sign | best;
}

using Index = std::array<std::int64_t, kMaxTensorRank>;

// The address of one element.
inline char* address(const TensorView& t, const Index& index) {
  std::int64_t at = 0;
  for (int d = 0; d < t.rank; ++d) at += index[d] * t.stride[d];
  return static_cast<char*>(t.data) + at * size_of(t.dtype);
}

template <class T>
T read_as(const char* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline double load(const TensorView& t, const Index& index) {
  const char* p = address(t, index);
  switch (t.dtype) {
    case DType::kFloat32:
      return read_as<float>(p);
    case DType::kFloat16:
      return kFp16.decode(read_as<std::uint16_t>(p));
    case DType::kBFloat16:
      return kBf16.decode(read_as<std::uint16_t>(p));
    case DType::kInt32:
      return read_as<std::int32_t>(p);
    case DType::kBool:
      return read_as<std::uint8_t>(p) != 0 ? 1 : 0;
    case DType::kInt64:
      return static_cast<double>(read_as<std::int64_t>(p));
    case DType::kUInt64:
      return static_cast<double>(read_as<std::uint64_t>(p));
    case DType::kFloat8E4M3:
      return decode_fp8(read_as<std::uint8_t>(p));
  }
  return NAN;
}

inline void store(const TensorView& t, const Index& index, double x) {
  char* p = address(t, index);
  auto put = [p](auto value) { std::memcpy(p, &value, sizeof value); };
  switch (t.dtype) {
    case DType::kFloat32:
      return put(static_cast<float>(x));
    case DType::kFloat16:
      return put(kFp16.encode(x));
    case DType::kBFloat16:
      return put(kBf16.encode(x));
    case DType::kInt32:
      return put(static_cast<std::int32_t>(x));
    case DType::kBool:
      return put(static_cast<std::uint8_t>(x != 0));
    case DType::kInt64:
      return put(static_cast<std::int64_t>(x));
    case DType::kUInt64:
      return put(static_cast<std::uint64_t>(x));
    case DType::kFloat8E4M3:
      return put(encode_fp8(x));
  }
}

// Calls fn(index) for every element, in row-major order.
template <class F>
void for_each_index(const TensorView& t, F fn) {
  Index index{};
  for (std::int64_t n = t.numel(); n > 0; --n) {
    fn(index);
    for (int d = t.rank - 1; d >= 0 && ++index[d] == t.shape[d]; --d) index[d] = 0;
  }
}

// The elements in row-major order.
inline std::vector<double> dense(const TensorView& t) {
  std::vector<double> values;
  if (!t.given()) return values;
  for_each_index(t, [&](const Index& index) { values.push_back(load(t, index)); });
  return values;
}

enum class Layout {
  kContiguous,
  kPadded,      // gaps after every row and every slice; rows start at odd elements
  kHeadsFirst,  // the last two but one dimensions swapped in memory: (batch, num_heads, seqlen, head_dim)
  kReversed,    // the sequence runs backwards in memory: a negative stride
};

class HostTensor {
 public:
  HostTensor() = default;
  HostTensor(DType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::kContiguous) {
    const int rank = static_cast<int>(shape.size());
    view_.dtype = dtype;
    view_.rank = rank;
    std::vector<int> order(rank);  // dimensions from the outermost in memory
    for (int d = 0; d < rank; ++d) order[d] = d;
    if (layout == Layout::kHeadsFirst && rank >= 3) std::swap(order[rank - 3], order[rank - 2]);
    std::int64_t step = 1;
    for (int n = rank - 1; n >= 0; --n) {
      const int d = order[n];
      view_.shape[d] = shape[d];
      view_.stride[d] = step;
      step *= std::max<std::int64_t>(shape[d], 1);
      if (layout == Layout::kPadded) step += n + 1;
    }
    bytes_.assign((step + 1) * size_of(dtype), kUntouched);
    std::int64_t first = layout == Layout::kPadded ? 1 : 0;
    if (layout == Layout::kReversed && rank >= 3 && shape[rank - 3] > 0) {
      first = view_.stride[rank - 3] * (shape[rank - 3] - 1);
      view_.stride[rank - 3] *= -1;
    }
    offset_ = first * size_of(dtype);
  }

  TensorView view() const {
    TensorView v = view_;
    if (v.given()) v.data = const_cast<unsigned char*>(bytes_.data()) + offset_;
    return v;
  }
  // The bytes between the elements as they were made.
  bool gaps_untouched() const {
    HostTensor copy = *this;
    const TensorView v = copy.view();
    for_each_index(v, [&](const Index& index) { std::memset(address(v, index), kUntouched, size_of(v.dtype)); });
    return std::all_of(copy.bytes_.begin(), copy.bytes_.end(), [](unsigned char b) { return b == kUntouched; });
  }
  const std::vector<unsigned char>& bytes() const { return bytes_; }

  HostTensor& fill(double x) {
    const TensorView v = view();
    for_each_index(v, [&](const Index& index) { store(v, index, x); });
    return *this;
  }
  HostTensor& fill_normal(std::mt19937& rng, double deviation = 1) {
    std::normal_distribution<double> normal(0, deviation);
    const TensorView v = view();
    for_each_index(v, [&](const Index& index) { store(v, index, normal(rng)); });
    return *this;
  }

 private:
  static constexpr unsigned char kUntouched = 0xA5;
  TensorView view_;
  std::vector<unsigned char> bytes_;
  std::int64_t offset_ = 0;
};

}  // namespace flashsdk::testing
