// What the CPU kernels are made of, callable from a test. One probe per instruction set, in cpu_probe.cpp; data, so
// that reading it runs no code of an instruction set the machine may lack.
#pragma once

#include <cstdint>

namespace flashsdk::testing {

struct CpuProbe {
  const char* isa;
  int lanes, panel;  // of a vector, and of a micro-kernel

  // Element-wise on n floats, n a multiple of lanes.
  void (*exp2[3])(const float* t, float* out, int n);  // polynomials of degree 3, 4 and 5
  void (*tanh)(const float* x, float* out, int n);
  void (*to_bf16)(const float* x, std::uint16_t* out, int n);
  void (*to_fp16)(const float* x, std::uint16_t* out, int n);
  void (*from_bf16)(const std::uint16_t* x, float* out, int n);
  void (*from_fp16)(const std::uint16_t* x, float* out, int n);
  // The scalar conversions of tails.
  void (*scalar_to_bf16)(const float* x, std::uint16_t* out, int n);
  void (*scalar_to_fp16)(const float* x, std::uint16_t* out, int n);
  void (*scalar_from_bf16)(const std::uint16_t* x, float* out, int n);
  void (*scalar_from_fp16)(const std::uint16_t* x, float* out, int n);
  // Of float8_e4m3fn, by vectors and by scalars.
  void (*from_fp8)(const std::uint8_t* x, float* out, int n);
  void (*scalar_from_fp8)(const std::uint8_t* x, float* out, int n);
  // lanes values: -inf where not begin <= key < end; 0 where the byte is below the threshold; 0 where -inf.
  void (*mask_keys)(float* s, const std::int32_t* begin, const std::int32_t* end, int key);
  void (*keep_at_least)(float* x, const std::uint8_t* bytes, int threshold);
  void (*finite_or_zero)(float* x);
  // lanes x lanes floats.
  void (*transpose)(const float* src, std::int64_t src_stride, float* dst, std::int64_t dst_stride);

  // C (padded rows, panel) = or += A (rows, steps) · B (steps, panel), A by rows of kALd or transposed, as the kernels
  // do; rescale, when not null, multiplies each column of C before A·B is added to it; maximum, when not null, takes
  // the running maximum of each column of C. Returns the rows written.
  static constexpr int kALd = 64;
  using Product = int(const float* a, bool a_transposed, const float* b, int steps, float* c, int rows, bool add,
                      const float* rescale, float* maximum);
  Product* product[4];  // [n] of the first n + 1 vectors of lanes alone, up to the last of a panel

  // C (rows, and up to three more; panel) = A·B of bf16, packed as the kernels pack them: A (rows, steps) and B (lanes,
  // steps), or, to be summed over their rows, A (steps, rows) and B (steps, lanes). At most kMaxRows and kMaxSteps. [n]
  // as above; null where bf16 is computed as fp32.
  static constexpr int kMaxRows = 40, kMaxSteps = 64;
  using Bf16Product = void(const std::uint16_t* a, bool summed, const std::uint16_t* b, int steps, float* c, int rows);
  Bf16Product* bf16_product[4];

  // The same on tile registers, null where there are none: words hold pairs of bf16, `words` of them (a multiple of 16)
  // are summed over. [1] and [2] take values in two parts, of whose products [1] leaves out the last; the second part
  // is kAPart words behind the first in A and kBPartRows rows behind it in B.
  static constexpr int kAPart = 32, kBPartRows = 32;
  using TileProduct = int(const std::uint32_t* a, const std::uint32_t* b, int words, float* c, int rows,
                          const float* rescale, float* maximum);
  TileProduct* tile_product[3];
  // n fp16 in two parts, each a bf16; null where tile_product is.
  void (*split_fp16)(const std::uint16_t* x, int n, std::uint16_t* first, std::uint16_t* second);
  // Whether the calling thread's tile registers are in their initial state.
  bool (*tiles_released)();
};

}  // namespace flashsdk::testing
