// Moves tensor rows into the layouts the micro-kernels read, and results back: convert, transpose, pair, zero-pad.
#pragma once

#include <type_traits>

#include "cpu/microkernel.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// n elements converted to float, zeros up to n_padded.
template <class T>
void load_row(const T* src, int n, int n_padded, float* dst) {
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) store(dst + c, load_as_float(src + c));
  for (; c < n; ++c) dst[c] = to_float(src[c]);
  for (; c < n_padded; ++c) dst[c] = 0.f;
}

// n elements of 8 bits as 16-bit ones, which hold them exactly.
template <class T>
void widen_row(const Fp8* src, int n, T* dst) {
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) store_as(dst + c, load_as_float(src + c));
  for (; c < n; ++c) dst[c] = from_float<T>(to_float(src[c]));
}

// n floats times scale, converted to T.
template <class T>
void store_row(const float* src, int n, float scale, T* dst) {
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) store_as(dst + c, mul(load(src + c), set1(scale)));
  for (; c < n; ++c) dst[c] = from_float<T>(src[c] * scale);
}

// n elements in pairs of bf16, and behind them, from word kPart on, what these leave out; zeros up to n_padded.
template <int kPart, class T>
void split_row([[maybe_unused]] const T* src, [[maybe_unused]] int n, [[maybe_unused]] int n_padded,
               [[maybe_unused]] std::uint32_t* dst) {
#if defined(__AVX512BF16__)
  constexpr int kPair = 2 * kLanes;
  alignas(64) float tail[kPair];
  for (int c = 0; c < n_padded; c += kPair, dst += kLanes) {
    const bool whole = c + kPair <= n;
    if (!whole) load_row(src + c, max_of(0, n - c), kPair, tail);
    const Bf16Parts<2> x(whole ? load_as_float(src + c) : load(tail),
                         whole ? load_as_float(src + c + kLanes) : load(tail + kLanes));
    store_pairs(dst, x.part[0]);
    store_pairs(dst + kPart, x.part[1]);
  }
#endif
}

// Rows as the products read them: (rows, kPitch) words, columns d … d_padded zero, and kPart words from one part of a
// row to the next.
template <class Dot, int kPitch, int kPart, class T>
void pack_rows(const T* src, std::int64_t stride, int rows, int d, int d_padded, typename Dot::Word* dst) {
  for (int r = 0; r < rows; ++r) {
    if constexpr (Dot::kStep == 1) {
      load_row(src + r * stride, d, d_padded, dst + r * kPitch);
    } else if constexpr (Dot::kParts == 1) {  // already words in memory
      auto* row = reinterpret_cast<std::uint16_t*>(dst + r * kPitch);
      std::memcpy(row, src + r * stride, d * sizeof(T));
      std::memset(row + d, 0, (d_padded - d) * sizeof(T));
    } else {
      split_row<kPart>(src + r * stride, d, d_padded, dst + r * kPitch);
    }
  }
}

template <class Dot, int kPitch>
FLASHSDK_HD void zero_rows(int rows, typename Dot::Word* dst) {
  std::memset(dst, 0, sizeof(*dst) * rows * kPitch);
}

// kStep neighbouring rows side by side, the operand of a product that sums over rows: (ceil(rows / kStep), kPitch)
// words.
template <class Dot, int kPitch, class T>
void pack_row_words(const T* src, std::int64_t stride, int rows, int d, int d_padded, typename Dot::Word* dst) {
  if constexpr (Dot::kStep == 1) {
    pack_rows<Dot, kPitch, 0>(src, stride, rows, d, d_padded, dst);
  } else {
#if defined(__AVX512BF16__)
    for (int r = 0; r < rows; r += 2, dst += kPitch) {
      const auto* a = reinterpret_cast<const std::uint16_t*>(src + r * stride);
      const bool pair = r + 1 < rows;
      const auto* b = pair ? reinterpret_cast<const std::uint16_t*>(src + (r + 1) * stride) : a;
      int c = 0;
      if (pair)
        for (; c + kLanes <= d; c += kLanes) interleave_rows(a + c, b + c, dst + c);
      for (; c < d; ++c) dst[c] = a[c] | (pair ? std::uint32_t{b[c]} << 16 : 0u);
      for (; c < d_padded; ++c) dst[c] = 0;
    }
#elif defined(FLASHSDK_NEON_BF16)
    for (int r = 0; r < rows; r += 4, dst += kPitch) {
      const int count = min_of(4, rows - r);
      const std::uint16_t* row[4];
      for (int n = 0; n < 4; ++n)
        row[n] = reinterpret_cast<const std::uint16_t*>(src + (r + min_of(n, count - 1)) * stride);
      int c = 0;
      if (count == 4)
        for (; c + kLanes <= d; c += kLanes) interleave_rows(row, c, dst + c);
      for (; c < d; ++c) {
        dst[c] = 0;
        for (int n = 0; n < count; ++n) dst[c] |= std::uint64_t{row[n][c]} << 16 * n;
      }
      for (; c < d_padded; ++c) dst[c] = 0;
    }
#endif
  }
}

// Rows as operand A of a product that sums over them, in words: by columns (pack_row_words), kStepPitch words from one
// step to the next; or with kRowPitch words from one column to the next, transposed.
template <class Dot, int kRowPitch, int kStepPitch, class T>
void pack_summed_rows(const T* src, std::int64_t stride, int rows, int d, int d_padded, typename Dot::Word* dst) {
  if constexpr (!Dot::kTiles) {
    pack_row_words<Dot, kStepPitch>(src, stride, rows, d, d_padded, dst);
  } else {
#if defined(__AMX_BF16__)
    static_assert(kStepPitch == 1);
    const auto* bits = reinterpret_cast<const std::uint16_t*>(src);
    for (int r = 0; r < rows; r += 2 * kLanes)
      for (int c = 0; c < d_padded; c += kLanes)
        transpose_row_pairs(bits + r * stride + c, stride, rows - r, d - c, dst + c * kRowPitch + r / 2, kRowPitch);
#endif
  }
}

// The same of packed rows, kRowPitch words apart, of all their parts: kRowPart words from one to the next there, and
// Summed::kPart here.
template <class Dot, class Summed, int kRowPitch, int kRowPart>
void pack_summed_parts(const typename Dot::Word* packed, int rows, int d, int d_padded, typename Dot::Word* dst) {
  for (int part = 0; part < Dot::kParts; ++part)
    pack_summed_rows<Dot, Summed::kRow, Summed::kStep>(reinterpret_cast<const Bf16*>(packed + part * kRowPart),
                                                       kRowPitch * Dot::kStep, rows, d, d_padded,
                                                       dst + part * Summed::kPart);
}

// The transpose of packed rows: (d_padded / kStep, kRowsOut) words from (rows, kPitch), whose rows are a multiple of
// kLanes. Lanes behind them, which only tile registers read, are zeros there.
template <class Dot, int kPitch, int kRowsOut>
void transpose_rows(const typename Dot::Word* src, int rows, int d_padded, typename Dot::Word* dst) {
  const int steps = ceil_div(d_padded, Dot::kStep);
  for (int c = 0; c < steps; c += kLanes)
    for (int r = 0; r < rows; r += kLanes) transpose(src + r * kPitch + c, kPitch, dst + c * kRowsOut + r, kRowsOut);
  if (!Dot::kTiles || rows == kRowsOut) return;
  for (int c = 0; c < round_up(steps, kLanes); ++c)
    std::memset(dst + c * kRowsOut + rows, 0, sizeof(*dst) * (kRowsOut - rows));
}

// Multiplies a packed operand by zero, 1 or a power of two, which is exact in bf16 too (ScaleSplit in scores.h).
FLASHSDK_HD float scaled(float x, float factor) { return x * factor; }
FLASHSDK_HD std::uint32_t scaled(std::uint32_t bf16_pair, float factor) {
  const float low = bit_cast<float>(bf16_pair << 16), high = bit_cast<float>(bf16_pair & 0xFFFF0000u);
  return bit_cast<std::uint32_t>(low * factor) >> 16 | (bit_cast<std::uint32_t>(high * factor) & 0xFFFF0000u);
}
FLASHSDK_HD std::uint64_t scaled(std::uint64_t bf16_quad, float factor) {
  const std::uint64_t high = scaled(static_cast<std::uint32_t>(bf16_quad >> 32), factor);
  return high << 32 | scaled(static_cast<std::uint32_t>(bf16_quad), factor);
}
template <class Word>
void scale_operand(Word* operand, float factor, int words) {
  if (factor == 1.f) return;
  if (factor == 0.f) return static_cast<void>(std::memset(operand, 0, sizeof(Word) * words));
  for (int i = 0; i < words; ++i) operand[i] = scaled(operand[i], factor);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
