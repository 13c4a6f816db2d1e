// Compiled once per instruction set, with FLASHSDK_ISA_NS its name. No template of the standard library is
// instantiated here: the linker could pick that copy for code that runs everywhere.
#include "per_isa/cpu_probe.h"

#include "cpu/pack.h"
#include "cpu/tiles.h"

#define FLASHSDK_TEXT_(x) #x
#define FLASHSDK_TEXT(x) FLASHSDK_TEXT_(x)
#define FLASHSDK_JOIN_(a, b) a##b
#define FLASHSDK_JOIN(a, b) FLASHSDK_JOIN_(a, b)

namespace flashsdk::cpu::FLASHSDK_ISA_NS {
namespace {

template <int kDegree>
void probe_exp2(const float* t, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) store(out + i, exp2<kDegree>(load(t + i)));
}
void probe_tanh(const float* x, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) store(out + i, tanh(load(x + i)));
}
template <class T>
void probe_to(const float* x, std::uint16_t* out, int n) {
  for (int i = 0; i < n; i += kLanes) store_as(reinterpret_cast<T*>(out) + i, load(x + i));
}
template <class T, class Bits = std::uint16_t>
void probe_from(const Bits* x, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) store(out + i, load_as_float(reinterpret_cast<const T*>(x) + i));
}
template <class T>
void probe_scalar_to(const float* x, std::uint16_t* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = from_float<T>(x[i]).bits;
}
template <class T, class Bits = std::uint16_t>
void probe_scalar_from(const Bits* x, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = to_float(T{x[i]});
}
void probe_mask_keys(float* s, const std::int32_t* begin, const std::int32_t* end, int key) {
  store(s, mask_keys(load(s), load_int(begin), load_int(end), key));
}
void probe_keep_at_least(float* x, const std::uint8_t* bytes, int threshold) {
  store(x, keep_at_least(load(x), bytes, threshold));
}
void probe_finite_or_zero(float* x) { store(x, finite_or_zero(load(x))); }
void probe_transpose(const float* src, std::int64_t src_stride, float* dst, std::int64_t dst_stride) {
  transpose(src, src_stride, dst, dst_stride);
}

constexpr int kPanelLanes = kVecs * kLanes;

// Of the first kUsed vectors of a panel, whose strides are S.
template <int kUsed, class S>
void run_product(const float* a, const float* b, int steps, float* c, int rows, bool add, const float* rescale,
                 float* maximum) {
  Vec highest[kUsed], scale[kUsed];
  for (int v = 0; v < kUsed; ++v) {
    if (maximum != nullptr) highest[v] = load(maximum + v * kLanes);
    if (rescale != nullptr) scale[v] = load(rescale + v * kLanes);
  }
  Vec* to_raise = maximum != nullptr ? highest : nullptr;
  if (rescale != nullptr) {
    product<DotF32, S, kUsed>(a, b, steps, c, rows, FromScaledC{scale}, to_raise);
  } else if (add) {
    product<DotF32, S, kUsed>(a, b, steps, c, rows, FromC{}, to_raise);
  } else {
    product<DotF32, S, kUsed>(a, b, steps, c, rows, FromZero{}, to_raise);
  }
  if (maximum != nullptr)
    for (int v = 0; v < kUsed; ++v) store(maximum + v * kLanes, highest[v]);
}

template <int kUsed>
int probe_product(const float* a, bool a_transposed, const float* b, int steps, float* c, int rows, bool add,
                  const float* rescale, float* maximum) {
  constexpr int kLd = flashsdk::testing::CpuProbe::kALd;
  a_transposed
      ? run_product<kUsed, Strides<1, kLd, kPanelLanes, kPanelLanes>>(a, b, steps, c, rows, add, rescale, maximum)
      : run_product<kUsed, Strides<kLd, 1, kPanelLanes, kPanelLanes>>(a, b, steps, c, rows, add, rescale, maximum);
  return padded_rows(rows);
}

#if defined(__AVX512BF16__) || defined(FLASHSDK_NEON_BF16)
template <int kUsed>
void probe_bf16_product(const std::uint16_t* a_bits, bool summed, const std::uint16_t* b_bits, int steps, float* c,
                        int rows) {
  using P = flashsdk::testing::CpuProbe;
  constexpr int kPart = P::kMaxSteps / DotBf16::kStep, kPitch = kPart + 8, kColumns = P::kMaxRows + 8;
  const auto *a = reinterpret_cast<const Bf16*>(a_bits), *b = reinterpret_cast<const Bf16*>(b_bits);
  alignas(64) DotBf16::Word a_words[max_of(kColumns * kPitch, kPart * kColumns)];
  alignas(64) DotBf16::Word b_words[kPart * kPanelLanes], b_rows[kPanelLanes * kPitch];
  const int words = ceil_div(steps, DotBf16::kStep), lanes = kUsed * kLanes;
  if (summed) {
    pack_row_words<DotBf16, kColumns>(a, rows, steps, rows, kColumns, a_words);
    pack_row_words<DotBf16, kPanelLanes>(b, lanes, steps, lanes, kPanelLanes, b_words);
    product<DotBf16, Strides<1, kColumns, kPanelLanes, kPanelLanes>, kUsed>(a_words, b_words, words, c, rows,
                                                                            FromZero{});
  } else {
    pack_rows<DotBf16, kPitch, kPart>(a, steps, rows, steps, P::kMaxSteps, a_words);
    zero_rows<DotBf16, kPitch>(DotBf16::kMaxRowPadding, a_words + rows * kPitch);
    pack_rows<DotBf16, kPitch, kPart>(b, steps, lanes, steps, P::kMaxSteps, b_rows);
    transpose_rows<DotBf16, kPitch, kPanelLanes>(b_rows, lanes, P::kMaxSteps, b_words);
    product<DotBf16, Strides<kPitch, 1, kPanelLanes, kPanelLanes>, kUsed>(a_words, b_words, words, c, rows, FromZero{});
  }
}
#else
template <int>
constexpr flashsdk::testing::CpuProbe::Bf16Product* probe_bf16_product = nullptr;
#endif

#if defined(__AMX_BF16__)
template <class Dot>
int probe_tile_product(const std::uint32_t* a, const std::uint32_t* b, int words, float* c, int rows,
                       const float* rescale, float* maximum) {
  using P = flashsdk::testing::CpuProbe;
  using S = Strides<P::kALd, 1, kPanelLanes, kPanelLanes, P::kAPart, P::kBPartRows * kPanelLanes>;
  Vec highest[kVecs], scale[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    if (maximum != nullptr) highest[v] = load(maximum + v * kLanes);
    if (rescale != nullptr) scale[v] = load(rescale + v * kLanes);
  }
  Vec* to_raise = maximum != nullptr ? highest : nullptr;
  take_tile_registers();
  if (rescale != nullptr) {
    product<Dot, S>(a, b, words, c, rows, FromScaledC{scale}, to_raise);
  } else {
    product<Dot, S>(a, b, words, c, rows, FromZero{}, to_raise);
  }
  release_tile_registers();
  if (maximum != nullptr)
    for (int v = 0; v < kVecs; ++v) store(maximum + v * kLanes, highest[v]);
  return Dot::padded_rows(rows);
}
void probe_split_fp16(const std::uint16_t* x, int n, std::uint16_t* first, std::uint16_t* second) {
  constexpr int kCount = 64, kPart = kCount / 2;
  alignas(64) std::uint32_t row[2 * kPart];
  for (int i = 0; i < n; i += kCount) {
    const int count = min_of(kCount, n - i);
    pack_rows<DotAmxSplit, 2 * kPart, kPart>(reinterpret_cast<const Fp16*>(x + i), 0, 1, count, kCount, row);
    std::memcpy(first + i, row, sizeof(*first) * count);
    std::memcpy(second + i, row + kPart, sizeof(*second) * count);
  }
}
bool probe_tiles_released() {
  alignas(64) std::uint8_t shapes[64] = {};
  _tile_storeconfig(shapes);
  asm volatile("" ::: "memory");
  return shapes[0] == 0;  // no palette
}
#else
template <class>
constexpr flashsdk::testing::CpuProbe::TileProduct* probe_tile_product = nullptr;
struct DotAmx;
struct DotAmxSplit;
struct DotAmxExact;
constexpr void (*probe_split_fp16)(const std::uint16_t*, int, std::uint16_t*, std::uint16_t*) = nullptr;
constexpr bool (*probe_tiles_released)() = nullptr;
#endif

}  // namespace
}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS

namespace flashsdk::testing {

using namespace flashsdk::cpu::FLASHSDK_ISA_NS;
using flashsdk::cpu::Bf16;
using flashsdk::cpu::Fp16;
using flashsdk::cpu::Fp8;

extern const CpuProbe FLASHSDK_JOIN(cpu_probe_, FLASHSDK_ISA_NS);
constinit const CpuProbe FLASHSDK_JOIN(cpu_probe_, FLASHSDK_ISA_NS) = {
    FLASHSDK_TEXT(FLASHSDK_ISA_NS),
    kLanes,
    kPanelLanes,
    {probe_exp2<3>, probe_exp2<4>, probe_exp2<5>},
    probe_tanh,
    probe_to<Bf16>,
    probe_to<Fp16>,
    probe_from<Bf16>,
    probe_from<Fp16>,
    probe_scalar_to<Bf16>,
    probe_scalar_to<Fp16>,
    probe_scalar_from<Bf16>,
    probe_scalar_from<Fp16>,
    probe_from<Fp8, std::uint8_t>,
    probe_scalar_from<Fp8, std::uint8_t>,
    probe_mask_keys,
    probe_keep_at_least,
    probe_finite_or_zero,
    probe_transpose,
    {probe_product<1>, probe_product<2>, probe_product<min_of(3, kVecs)>, probe_product<kVecs>},
    {probe_bf16_product<1>, probe_bf16_product<2>, probe_bf16_product<min_of(3, kVecs)>, probe_bf16_product<kVecs>},
    {probe_tile_product<DotAmx>, probe_tile_product<DotAmxSplit>, probe_tile_product<DotAmxExact>},
    probe_split_fp16,
    probe_tiles_released,
};

}  // namespace flashsdk::testing
