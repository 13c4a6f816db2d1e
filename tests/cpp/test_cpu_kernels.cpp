// The parts of the CPU kernels, for every instruction set this machine has: vector functions over all of their range,
// conversions bit by bit, the micro-kernel at every number of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "cpu_features.h"
#include "host_tensor.h"
#include "per_isa/cpu_probe.h"

namespace flashsdk::testing {

#define FLASHSDK_PROBE(isa) extern const CpuProbe cpu_probe_##isa;
FLASHSDK_TEST_ISAS
#undef FLASHSDK_PROBE

namespace {

const CpuProbe* const kProbes[] = {
#define FLASHSDK_PROBE(isa) &cpu_probe_##isa,
    FLASHSDK_TEST_ISAS
#undef FLASHSDK_PROBE
};

constexpr float kInf = std::numeric_limits<float>::infinity();

class CpuKernels : public ::testing::TestWithParam<const CpuProbe*> {
 protected:
  void SetUp() override {
    if (!cpu_supports(GetParam()->isa)) GTEST_SKIP() << "this processor has no " << GetParam()->isa;
  }
  const CpuProbe& probe() const { return *GetParam(); }

  // fn on inputs padded to whole vectors.
  template <class Out, class In>
  std::vector<Out> map(void (*fn)(const In*, Out*, int), std::vector<In> in) {
    const std::size_t n = in.size();
    in.resize((n + 15) / 16 * 16);
    std::vector<Out> out(in.size());
    fn(in.data(), out.data(), static_cast<int>(in.size()));
    out.resize(n);
    return out;
  }
};
std::string isa_of(const ::testing::TestParamInfo<const CpuProbe*>& info) { return info.param->isa; }
INSTANTIATE_TEST_SUITE_P(, CpuKernels, ::testing::ValuesIn(kProbes), isa_of);

// Of the instruction sets with tile registers alone; a build may have none.
class CpuTiles : public CpuKernels {};
std::vector<const CpuProbe*> probes_with_tiles() {
  std::vector<const CpuProbe*> probes;
  for (const CpuProbe* probe : kProbes)
    if (probe->tile_product[0] != nullptr) probes.push_back(probe);
  return probes;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CpuTiles);
INSTANTIATE_TEST_SUITE_P(, CpuTiles, ::testing::ValuesIn(probes_with_tiles()), isa_of);

// … and of those with instructions for bf16.
class CpuBf16 : public CpuKernels {};
std::vector<const CpuProbe*> probes_with_bf16() {
  std::vector<const CpuProbe*> probes;
  for (const CpuProbe* probe : kProbes)
    if (probe->bf16_product[0] != nullptr) probes.push_back(probe);
  return probes;
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CpuBf16);
INSTANTIATE_TEST_SUITE_P(, CpuBf16, ::testing::ValuesIn(probes_with_bf16()), isa_of);

// Every exponent and 64 fractions, both signs, and what lies at the edges.
std::vector<float> floats_of_every_size() {
  std::vector<float> values{0.f, -0.f};
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (std::uint32_t step = 0; step < 64; ++step) {
      for (std::uint32_t sign : {0u, 1u}) {
        const std::uint32_t bits = sign << 31 | exponent << 23 | ((step * 0x9E3779B9u) & 0x7FFFFF);
        values.push_back(read_as<float>(reinterpret_cast<const char*>(&bits)));
      }
    }
  }
  return values;
}

TEST_P(CpuKernels, Exp2IsAccurateWhereTheSoftmaxUsesIt) {
  const double bound[] = {8.7e-5, 3.1e-6, 1.8e-7};  // degree 3, 4, 5: the polynomial's error and its roundings
  std::vector<float> t{0.f, -0.f, -1e-30f, -1e-45f, -1.f, -125.f, -126.f};
  for (float x = 0; x < 126; x += 0.00037f) t.push_back(-x);
  for (int degree = 3; degree <= 5; ++degree) {
    const std::vector<float> ours = map(probe().exp2[degree - 3], t);
    double worst = 0;
    for (std::size_t n = 0; n < t.size(); ++n) {
      const double error = std::fabs(ours[n] / std::exp2(static_cast<double>(t[n])) - 1);
      if (std::isnan(error) || error > worst) worst = error;  // NaN stays
    }
    EXPECT_LE(worst, bound[degree - 3]) << "degree " << degree;
    EXPECT_EQ(ours[0], 1.f) << "degree " << degree;  // 2^0: what the online softmax rescales by again and again
  }
}

TEST_P(CpuKernels, Exp2OfVerySmallIsZeroAndOfNanIsNan) {
  std::vector<float> tiny{
      -kInf, -std::numeric_limits<float>::max(), -1e30f, -1e10f, -2147483648.f, -65536.f, -1000.f, -151.f, -150.f};
  for (auto* exp2 : probe().exp2) {
    for (float x : map(exp2, tiny)) EXPECT_TRUE(x >= 0 && x <= std::exp2(-126.f)) << x;
    EXPECT_EQ(map(exp2, std::vector<float>{-kInf})[0], 0.f);
    EXPECT_TRUE(std::isnan(map(exp2, std::vector<float>{NAN})[0]));
  }
  // Between the smallest normal number and zero the result is as good as absent: below 2^-126, never negative.
  std::vector<float> between;
  for (float t = -150; t < -126; t += 0.01f) between.push_back(t);
  for (auto* exp2 : probe().exp2) {
    for (float x : map(exp2, between)) ASSERT_TRUE(x >= 0 && x <= std::exp2(-125.99f)) << x;
  }
}

TEST_P(CpuKernels, TanhIsAccurateEverywhere) {
  const std::vector<float> x = floats_of_every_size(), ours = map(probe().tanh, x);
  for (std::size_t n = 0; n < x.size(); ++n) {
    const double expected = std::tanh(static_cast<double>(x[n]));
    // Denormals may be flushed.
    ASSERT_NEAR(ours[n], expected, 1e-6 * std::fabs(expected) + 1e-38) << x[n];
    ASSERT_LE(std::fabs(ours[n]), 1.f) << x[n];
  }
  EXPECT_EQ(map(probe().tanh, std::vector<float>{kInf, -kInf}), (std::vector<float>{1, -1}));
}

TEST_P(CpuKernels, EveryHalfConvertsToFloat) {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t n = 0; n < all.size(); ++n) all[n] = static_cast<std::uint16_t>(n);
  struct Case {
    HalfFormat format;
    void (*fn)(const std::uint16_t*, float*, int);
  };
  for (const Case& c : {Case{kBf16, probe().from_bf16}, Case{kFp16, probe().from_fp16},
                        Case{kBf16, probe().scalar_from_bf16}, Case{kFp16, probe().scalar_from_fp16}}) {
    const std::vector<float> ours = map(c.fn, all);
    for (std::size_t n = 0; n < all.size(); ++n) {
      const double expected = c.format.decode(all[n]);
      ASSERT_TRUE(ours[n] == expected || (std::isnan(ours[n]) && std::isnan(expected))) << std::hex << n;
      ASSERT_EQ(std::signbit(ours[n]), n >> 15 != 0) << std::hex << n;
    }
  }
}

// Also where the processor is told to take subnormal numbers for zeros, as PyTorch may.
TEST_P(CpuKernels, EveryFloat8ConvertsToFloat) {
  std::vector<std::uint8_t> all(256);
  for (std::size_t n = 0; n < all.size(); ++n) all[n] = static_cast<std::uint8_t>(n);
  for (const bool flushed : {false, true})
    for (const auto fn : {probe().from_fp8, probe().scalar_from_fp8}) {
#if defined(__x86_64__)
      const unsigned before = _mm_getcsr();
      if (flushed) _mm_setcsr(before | 0x8040);
#endif
      const std::vector<float> ours = map(fn, all);
#if defined(__x86_64__)
      _mm_setcsr(before);
#endif
      for (std::size_t n = 0; n < all.size(); ++n) {
        const double expected = decode_fp8(all[n]);
        ASSERT_TRUE(ours[n] == expected || (std::isnan(ours[n]) && std::isnan(expected))) << std::hex << n << flushed;
        if (std::isnan(expected)) continue;
        ASSERT_EQ(std::signbit(ours[n]), n >> 7 != 0) << std::hex << n;
      }
    }
}

TEST_P(CpuKernels, FloatsRoundToTheNearestHalf) {
  std::vector<float> x = floats_of_every_size();
  x.insert(x.end(), {kInf, -kInf, NAN});
  // Every tie between neighbouring halves, and the floats beside it.
  for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) {
    const std::uint32_t tie = bits << 16 | 0x8000;
    x.push_back(read_as<float>(reinterpret_cast<const char*>(&tie)));
  }
  for (std::uint16_t bits = 0; bits < 0x7C00; ++bits) {
    const double low = kFp16.decode(bits), high = bits == 0x7BFF ? 65536 : kFp16.decode(bits + 1);
    const float tie = static_cast<float>((low + high) / 2);
    x.insert(x.end(), {tie, std::nextafter(tie, kInf), std::nextafter(tie, -kInf), -tie});
  }
  struct Case {
    HalfFormat format;
    void (*fn)(const float*, std::uint16_t*, int);
  };
  for (const Case& c : {Case{kBf16, probe().to_bf16}, Case{kFp16, probe().to_fp16}, Case{kBf16, probe().scalar_to_bf16},
                        Case{kFp16, probe().scalar_to_fp16}}) {
    const std::vector<std::uint16_t> ours = map(c.fn, x);
    for (std::size_t n = 0; n < x.size(); ++n) {
      if (std::isnan(x[n])) {
        ASSERT_TRUE(std::isnan(c.format.decode(ours[n])));
      } else {
        ASSERT_EQ(ours[n], c.format.encode(x[n])) << x[n];
      }
    }
  }
}

TEST_P(CpuKernels, MasksKeysDropsBytesAndClearsInfinity) {
  const int lanes = probe().lanes;
  std::mt19937 rng(1);
  for (int round = 0; round < 1000; ++round) {
    std::vector<std::int32_t> begin(lanes), end(lanes);
    std::vector<std::uint8_t> bytes(lanes);
    std::vector<float> s(lanes);
    for (int l = 0; l < lanes; ++l) {
      begin[l] = static_cast<int>(rng() % 8);
      end[l] = static_cast<int>(rng() % 8);
      bytes[l] = static_cast<std::uint8_t>(rng());
      s[l] = rng() % 4 == 0 ? -kInf : static_cast<float>(rng() % 100) - 50;
    }
    const int key = static_cast<int>(rng() % 8), threshold = static_cast<int>(rng() % 256);
    std::vector<float> masked = s, kept = s, finite = s;
    probe().mask_keys(masked.data(), begin.data(), end.data(), key);
    probe().keep_at_least(kept.data(), bytes.data(), threshold);
    probe().finite_or_zero(finite.data());
    for (int l = 0; l < lanes; ++l) {
      ASSERT_EQ(masked[l], begin[l] <= key && key < end[l] ? s[l] : -kInf);
      ASSERT_EQ(kept[l], bytes[l] >= threshold ? s[l] : 0.f);
      ASSERT_EQ(finite[l], s[l] == -kInf ? 0.f : s[l]);
    }
  }
}

TEST_P(CpuKernels, Transposes) {
  const int lanes = probe().lanes, src_ld = lanes + 3, dst_ld = lanes + 5;
  std::vector<float> src(src_ld * lanes), dst(dst_ld * lanes, -1.f);
  for (std::size_t n = 0; n < src.size(); ++n) src[n] = static_cast<float>(n);
  probe().transpose(src.data(), src_ld, dst.data(), dst_ld);
  for (int r = 0; r < lanes; ++r) {
    for (int c = 0; c < dst_ld; ++c) {
      ASSERT_EQ(dst[r * dst_ld + c], c < lanes ? src[c * src_ld + r] : -1.f) << r << ", " << c;
    }
  }
}

// Of whole panels, and of their first vectors of lanes alone: the others are neither read nor written.
TEST_P(CpuKernels, ProductOfEveryNumberOfRows) {
  constexpr int kALd = CpuProbe::kALd;
  const int panel = probe().panel;
  std::mt19937 rng(2);
  // Small integers: sums are exact, and a wrong element cannot hide in a tolerance.
  auto integers = [&](std::size_t n) {
    std::vector<float> values(n);
    for (float& x : values) x = static_cast<float>(static_cast<int>(rng() % 17) - 8);
    return values;
  };
  for (int rows = 1; rows <= 40; ++rows) {
    for (int steps : {0, 1, 2, 7, 33}) {
      for (int variant = 0; variant < 64; ++variant) {
        const bool transposed = (variant & 1) != 0, add = (variant & 2) != 0, with_maximum = (variant & 4) != 0;
        const bool rescaled = (variant & 8) != 0;
        const int vectors = std::min(variant / 16 + 1, panel / probe().lanes), used = vectors * probe().lanes;
        const std::vector<float> a = integers(kALd * kALd), rescale = integers(panel);
        std::vector<float> b = integers(panel * kALd);
        std::vector<float> c = integers(panel * (rows + 8)), maximum = integers(panel);
        const std::vector<float> c0 = c, maximum0 = maximum;
        for (int n = 0; n < panel * kALd; ++n)
          if (n % panel >= used) b[n] = NAN;
        const int written =
            probe().product[vectors - 1](a.data(), transposed, b.data(), steps, c.data(), rows, add,
                                         rescaled ? rescale.data() : nullptr, with_maximum ? maximum.data() : nullptr);
        ASSERT_GE(written, rows);
        ASSERT_LE(written, rows + 3);
        for (int lane = 0; lane < panel; ++lane) {
          float highest = maximum0[lane];
          for (int r = 0; r < rows + 8; ++r) {
            float expected = c0[r * panel + lane];
            if (r < written && lane < used) {
              expected *= rescaled ? rescale[lane] : add ? 1.f : 0.f;
              for (int s = 0; s < steps; ++s) {
                expected += (transposed ? a[s * kALd + r] : a[r * kALd + s]) * b[s * panel + lane];
              }
              highest = std::max(highest, expected);
            }
            ASSERT_EQ(c[r * panel + lane], expected)
                << rows << " rows, " << steps << " steps, row " << r << ", " << vectors << " vectors";
          }
          ASSERT_EQ(maximum[lane], with_maximum ? highest : maximum0[lane])
              << rows << " rows, " << vectors << " vectors";
        }
      }
    }
  }
}

TEST_P(CpuBf16, ProductOfEveryNumberOfRows) {
  const int panel = probe().panel;
  std::mt19937 rng(4);
  auto integers = [&](int n) {  // exact in bf16, and so are their sums in fp32
    std::vector<float> values(n);
    for (float& x : values) x = static_cast<float>(static_cast<int>(rng() % 17) - 8);
    return values;
  };
  auto encoded = [](const std::vector<float>& values) {
    std::vector<std::uint16_t> bits(values.size());
    for (std::size_t n = 0; n < bits.size(); ++n) bits[n] = kBf16.encode(values[n]);
    return bits;
  };
  for (int rows = 1; rows <= CpuProbe::kMaxRows; ++rows) {
    for (int steps : {1, 2, 3, 7, 33, 62, CpuProbe::kMaxSteps}) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool summed = variant % 2 != 0;
        const int vectors = std::min(variant / 2 + 1, panel / probe().lanes), lanes = vectors * probe().lanes;
        const std::vector<float> a = integers(rows * steps), b = integers(lanes * steps);
        std::vector<float> c(panel * (rows + 4), -1000.f);
        probe().bf16_product[vectors - 1](encoded(a).data(), summed, encoded(b).data(), steps, c.data(), rows);
        for (int lane = 0; lane < panel; ++lane) {
          for (int r = 0; r < rows; ++r) {
            float expected = lane < lanes ? 0.f : -1000.f;
            for (int s = 0; s < steps && lane < lanes; ++s)
              expected += summed ? a[s * rows + r] * b[s * lanes + lane] : a[r * steps + s] * b[lane * steps + s];
            ASSERT_EQ(c[r * panel + lane], expected)
                << rows << " rows, " << steps << " steps, row " << r << ", lane " << lane << ", variant " << variant;
          }
          ASSERT_EQ(c[(rows + 3) * panel + lane], -1000.f) << rows << " rows";
        }
      }
    }
  }
}

TEST_P(CpuTiles, ProductOnTileRegisters) {
  constexpr int kALd = CpuProbe::kALd, kAPart = CpuProbe::kAPart;
  const int panel = probe().panel, b_part = CpuProbe::kBPartRows * panel;
  std::mt19937 rng(3);
  auto integer = [&] { return static_cast<float>(static_cast<int>(rng() % 17) - 8); };  // exact in bf16
  auto pairs = [&](std::size_t n) {
    std::vector<std::uint32_t> words(n);
    for (std::uint32_t& w : words) w = kBf16.encode(integer()) | std::uint32_t{kBf16.encode(integer())} << 16;
    return words;
  };
  auto dot = [](std::uint32_t x, std::uint32_t y) {
    return kBf16.decode(x & 0xFFFF) * kBf16.decode(y & 0xFFFF) + kBf16.decode(x >> 16) * kBf16.decode(y >> 16);
  };
  for (int rows : {1, 15, 16, 17, 32, 33, 48, 66}) {
    for (int words : {16, 32, 64}) {
      for (int variant = 0; variant < 12; ++variant) {
        const bool rescaled = (variant & 1) != 0, with_maximum = (variant & 2) != 0;
        const int split = variant / 4;
        if (split > 0 && words > kAPart) continue;
        const int padded = (rows + 15) / 16 * 16;
        const std::vector<std::uint32_t> a = pairs(padded * kALd), b = pairs(panel * words + b_part);
        std::vector<float> c(panel * (padded + 2)), maximum(panel), rescale(panel);
        for (auto* values : {&c, &maximum, &rescale})
          for (float& x : *values) x = integer();
        std::fill(rescale.begin(), rescale.begin() + panel / 2, 1.f);  // lanes that keep their scale are passed over
        const std::vector<float> c0 = c, maximum0 = maximum;
        const int written =
            probe().tile_product[split](a.data(), b.data(), words, c.data(), rows, rescaled ? rescale.data() : nullptr,
                                        with_maximum ? maximum.data() : nullptr);
        ASSERT_EQ(written, padded);
        for (int lane = 0; lane < panel; ++lane) {
          float highest = maximum0[lane];
          for (int r = 0; r < padded + 2; ++r) {
            double expected = c0[r * panel + lane];
            if (r < written) {
              expected = rescaled && r < rows ? expected * rescale[lane] : (rescaled ? expected : 0);
              for (int s = 0; s < words; ++s) {
                const std::uint32_t *at_a = a.data() + r * kALd + s, *at_b = b.data() + s * panel + lane;
                expected += dot(*at_a, *at_b);
                if (split > 0) expected += dot(at_a[kAPart], *at_b) + dot(*at_a, at_b[b_part]);
                if (split > 1) expected += dot(at_a[kAPart], at_b[b_part]);
              }
              highest = std::max(highest, static_cast<float>(expected));
            }
            ASSERT_EQ(c[r * panel + lane], expected)
                << rows << " rows, " << words << " words, row " << r << (split > 0 ? ", in two parts" : "");
          }
          if (with_maximum) {
            ASSERT_EQ(maximum[lane], highest) << rows << " rows";
          }
        }
        ASSERT_TRUE(probe().tiles_released());
      }
    }
  }
}

TEST_P(CpuTiles, EveryFp16IsTheSumOfItsParts) {
  for (int n : {1 << 16, 37}) {
    std::vector<std::uint16_t> x(n), first(n), second(n);
    for (int i = 0; i < n; ++i) x[i] = static_cast<std::uint16_t>(n == 37 ? 0x3A01 + 77 * i : i);
    probe().split_fp16(x.data(), n, first.data(), second.data());
    for (int i = 0; i < n; ++i) {
      const double exact = kFp16.decode(x[i]), sum = double{kBf16.decode(first[i])} + kBf16.decode(second[i]);
      if (std::isfinite(exact)) {
        ASSERT_EQ(sum, exact) << x[i];
      } else {
        ASSERT_TRUE(std::isnan(sum)) << x[i];  // an infinity and a NaN, too
      }
    }
  }
}

}  // namespace
}  // namespace flashsdk::testing
