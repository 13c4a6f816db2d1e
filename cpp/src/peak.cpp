#include "peak.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace flashsdk {
namespace {

// Each loop keeps enough independent sums in registers to cover the latency of two units: 4 to 5 cycles each. The
// factors come from outside, so that the compiler cannot compute the result; the sums stay normal numbers.
struct Loop {
  double flops;  // of one step
  float (*run)(std::int64_t steps, float factor, float term);
};

#if defined(__x86_64__)

constexpr int kSumsAvx2 = 12;  // of 16 registers
__attribute__((target("avx2,fma"))) float loop_avx2(std::int64_t steps, float factor, float term) {
  const __m256 b = _mm256_set1_ps(factor), c = _mm256_set1_ps(term);
  __m256 sums[kSumsAvx2];
  for (auto& s : sums) s = b;
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSumsAvx2; ++j) sums[j] = _mm256_fmadd_ps(sums[j], b, c);
  }
  for (int j = 1; j < kSumsAvx2; ++j) sums[0] += sums[j];
  return sums[0][0];
}

constexpr int kSumsAvx512 = 16;  // of 32 registers
__attribute__((target("avx512f"))) float loop_avx512(std::int64_t steps, float factor, float term) {
  const __m512 b = _mm512_set1_ps(factor), c = _mm512_set1_ps(term);
  __m512 sums[kSumsAvx512];
  for (auto& s : sums) s = b;
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSumsAvx512; ++j) sums[j] = _mm512_fmadd_ps(sums[j], b, c);
  }
  for (int j = 1; j < kSumsAvx512; ++j) sums[0] += sums[j];
  return sums[0][0];
}

__attribute__((target("avx512f,avx512bf16"))) float loop_avx512_bf16(std::int64_t steps, float factor, float term) {
  const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(factor), _mm512_set1_ps(-factor));
  const __m512bh c = _mm512_cvtne2ps_pbh(_mm512_set1_ps(term), _mm512_set1_ps(term));
  __m512 sums[kSumsAvx512];
  for (auto& s : sums) s = _mm512_set1_ps(factor);
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSumsAvx512; ++j) sums[j] = _mm512_dpbf16_ps(sums[j], b, c);
  }
  for (int j = 1; j < kSumsAvx512; ++j) sums[0] += sums[j];
  return sums[0][0];
}

constexpr int kSumsAmx = 6;  // of 8 tile registers
__attribute__((target("avx512f,avx512bf16,amx-tile,amx-bf16"))) float loop_amx(std::int64_t steps, float factor,
                                                                               float term) {
  struct alignas(64) Shapes {  // palette 1, eight registers of 16 rows of 64 bytes
    std::uint8_t palette = 1, reserved[15] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };
  static constexpr Shapes kShapes;
  alignas(64) __m512i operand[2][16];
  for (int r = 0; r < 16; ++r) {
    operand[0][r] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_set1_ps(factor), _mm512_set1_ps(-factor)));
    operand[1][r] = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_set1_ps(term), _mm512_set1_ps(term)));
  }
  alignas(64) float sum[16][16];
  _tile_loadconfig(&kShapes);
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_loadd(6, operand[0], 64);
  _tile_loadd(7, operand[1], 64);
  for (std::int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_stored(0, sum, 64);
  _tile_release();
  return sum[0][0];
}

// The x86-64 baseline has no fused multiply-add.
constexpr int kSumsPortable = 12;
float loop_portable(std::int64_t steps, float factor, float term) {
  const __m128 b = _mm_set1_ps(factor), c = _mm_set1_ps(term);
  __m128 sums[kSumsPortable];
  for (auto& s : sums) s = b;
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSumsPortable; ++j) sums[j] = _mm_add_ps(_mm_mul_ps(sums[j], b), c);
  }
  for (int j = 1; j < kSumsPortable; ++j) sums[0] += sums[j];
  return sums[0][0];
}

#elif defined(__aarch64__)

constexpr int kSumsPortable = 20;  // of 32 registers
float loop_portable(std::int64_t steps, float factor, float term) {
  const float32x4_t b = vdupq_n_f32(factor), c = vdupq_n_f32(term);
  float32x4_t sums[kSumsPortable];
  for (auto& s : sums) s = b;
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 20
    for (int j = 0; j < kSumsPortable; ++j) sums[j] = vfmaq_f32(sums[j], b, c);
  }
  for (int j = 1; j < kSumsPortable; ++j) sums[0] += sums[j];
  return sums[0][0];
}

#if defined(__clang__)
#define FLASHSDK_WITH_BF16 __attribute__((target("bf16")))
#else
#define FLASHSDK_WITH_BF16 __attribute__((target("+bf16")))
#endif
// In text, since Clang 15 has no intrinsic where the file's target lacks the instruction.
FLASHSDK_WITH_BF16 float loop_neon_bf16(std::int64_t steps, float factor, float term) {
  const auto bf16 = [](float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 16;
  };
  const uint32x4_t b = vdupq_n_u32(bf16(factor) | bf16(-factor) << 16), c = vdupq_n_u32(bf16(term) | bf16(term) << 16);
  float32x4_t sums[kSumsPortable];
  for (auto& s : sums) s = vdupq_n_f32(factor);
  for (std::int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 20
    for (int j = 0; j < kSumsPortable; ++j) asm("bfmmla %0.4s, %1.8h, %2.8h" : "+w"(sums[j]) : "w"(b), "w"(c));
  }
  for (int j = 1; j < kSumsPortable; ++j) sums[0] += sums[j];
  return sums[0][0];
}

#else

constexpr int kSumsPortable = 8;
float loop_portable(std::int64_t steps, float factor, float term) {
  float sums[kSumsPortable][4];
  for (auto& s : sums)
    for (float& x : s) x = factor;
  for (std::int64_t i = 0; i < steps; ++i) {
    for (auto& s : sums)
      for (float& x : s) x = x * factor + term;
  }
  float total = 0.f;
  for (const auto& s : sums)
    for (float x : s) total += x;
  return total;
}

#endif

Loop loop_of(PeakKind kind, const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512_amx" && kind == PeakKind::kBf16Dot) return {kSumsAmx * 16 * 16 * 32 * 2., loop_amx};
  if (isa == "avx512_bf16" && kind == PeakKind::kBf16Dot) return {kSumsAvx512 * 32 * 2., loop_avx512_bf16};
  if (isa == "avx512_amx" || isa == "avx512_bf16" || isa == "avx512") return {kSumsAvx512 * 16 * 2., loop_avx512};
  if (isa == "avx2") return {kSumsAvx2 * 8 * 2., loop_avx2};
#elif defined(__aarch64__)
  if (isa == "neon_bf16" && kind == PeakKind::kBf16Dot) return {kSumsPortable * 16 * 2., loop_neon_bf16};
#endif
  (void)kind, (void)isa;
  return {kSumsPortable * 4 * 2., loop_portable};
}

}  // namespace

double measure_peak(PeakKind kind, const std::string& isa, int num_threads, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kSteps = 4096;  // some ten microseconds between two looks at the clock
  const Loop loop = loop_of(kind, isa);
  std::atomic<float> sink{0.f};
  std::atomic<double> total{0.};
  auto work = [&](int) {
    volatile float factor = 0.5f, term = 1.f;
    const auto start = Clock::now();
    double elapsed = 0.;
    std::int64_t rounds = 0;
    while (elapsed < seconds) {
      sink.store(loop.run(kSteps, factor, term), std::memory_order_relaxed);
      ++rounds;
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    total.fetch_add(static_cast<double>(rounds * kSteps) * loop.flops / elapsed);
  };
  // The threads that kernels run on, so that both meet the same processors.
  parallel_runner(num_threads)(work);
  return total / 1e9;
}

}  // namespace flashsdk
