// Any processor: GCC and Clang vector extensions, 128 bits (SSE2, NEON). Correct everywhere, as fast as the compiler.
#pragma once

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

typedef float Vec __attribute__((vector_size(16)));
typedef std::int32_t IVec __attribute__((vector_size(16)));
inline constexpr int kLanes = 4;
#if defined(__aarch64__)
inline constexpr int kVecs = 4;  // 32 registers
#else
inline constexpr int kVecs = 2;  // 16 registers
#endif

template <class V, class T>
FLASHSDK_HD V load_raw(const T* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

FLASHSDK_HD Vec set1(float x) { return Vec{x, x, x, x}; }
FLASHSDK_HD Vec zero() { return set1(0.f); }
FLASHSDK_HD Vec load(const float* p) { return load_raw<Vec>(p); }
FLASHSDK_HD void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
FLASHSDK_HD Vec add(Vec a, Vec b) { return a + b; }
FLASHSDK_HD Vec sub(Vec a, Vec b) { return a - b; }
FLASHSDK_HD Vec mul(Vec a, Vec b) { return a * b; }
FLASHSDK_HD Vec div(Vec a, Vec b) { return a / b; }
FLASHSDK_HD Vec select(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }
FLASHSDK_HD Vec max(Vec a, Vec b) { return select((IVec)(a > b), a, b); }
FLASHSDK_HD Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // contracted where the processor can
FLASHSDK_HD Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }
FLASHSDK_HD void keep_in_register(Vec&) {}

struct FloorParts {
  IVec floor;
  Vec fraction;
};
FLASHSDK_HD FloorParts floor_parts(Vec t) {
  t = select((IVec)(t < set1(-127.f)), set1(-127.f), t);  // NaN passes through
  IVec truncated = __builtin_convertvector(t, IVec);
  IVec floor = truncated + (IVec)(__builtin_convertvector(truncated, Vec) > t);  // a true lane is -1
  return {floor, t - __builtin_convertvector(floor, Vec)};
}
FLASHSDK_HD Vec scale_by_power_of_two(Vec p, FloorParts parts) {
  Vec power = (Vec)((parts.floor + 127) << 23);
  return select((IVec)(p == p), p * power, p);  // converting NaN to an integer says nothing: keep the NaN itself
}

FLASHSDK_HD Vec select_below(Vec x, float limit, Vec below, Vec other) {
  return select((IVec)(x < set1(limit)), below, other);
}
FLASHSDK_HD Vec copy_sign(Vec magnitude, Vec sign) { return (Vec)((IVec)magnitude | ((IVec)sign & (IVec)set1(-0.f))); }
// x where it is not -inf, else 0.
FLASHSDK_HD Vec finite_or_zero(Vec x) { return select((IVec)(x == set1(-INFINITY)), zero(), x); }

FLASHSDK_HD IVec load_int(const std::int32_t* p) { return load_raw<IVec>(p); }
FLASHSDK_HD Vec mask_keys(Vec s, IVec lo, IVec hi, std::int32_t j) {
  IVec key = {j, j, j, j};
  return select((IVec)(lo <= key) & (IVec)(hi > key), s, set1(-INFINITY));
}
// x where the lane's byte is >= threshold, else 0.
FLASHSDK_HD Vec keep_at_least(Vec x, const std::uint8_t* bytes, int threshold) {
  for (int l = 0; l < kLanes; ++l) x[l] = bytes[l] >= threshold ? x[l] : 0.f;
  return x;
}

template <class T>
FLASHSDK_HD Vec load_as_float(const T* p) {
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
template <class T>
FLASHSDK_HD void store_as(T* p, Vec x) {
  for (int l = 0; l < kLanes; ++l) p[l] = from_float<T>(x[l]);
}

// Lane i: the sum of all lanes of x[i].
FLASHSDK_HD Vec sum_of_each(const Vec (&x)[4]) {
  const auto sum = [](Vec y) __attribute__((always_inline)) { return (y[0] + y[2]) + (y[1] + y[3]); };
  return Vec{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])};
}

// dst[c][r] = src[r][c] for a 4 x 4 block of 32-bit words; strides in words.
FLASHSDK_HD void transpose(const void* src, std::int64_t src_stride, void* dst, std::int64_t dst_stride) {
  const auto* s = static_cast<const float*>(src);
  auto* d = static_cast<float*>(dst);
  for (int r = 0; r < kLanes; ++r) {
    Vec row = load(s + r * src_stride);
    for (int c = 0; c < kLanes; ++c) d[c * dst_stride + r] = row[c];
  }
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
