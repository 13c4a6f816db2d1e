#include "cpu_features.h"

#include <cstdint>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace flashsdk {

#if defined(__x86_64__)
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros for a leaf that the processor does not have.
Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

// The register states that the operating system saves for a thread (XCR0).
std::uint64_t saved_states() {
  std::uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}

constexpr bool has(std::uint64_t value, std::initializer_list<int> bits) {
  for (int bit : bits)
    if ((value >> bit & 1) == 0) return false;
  return true;
}

// Linux gives a process the tile registers' 8 KiB of state when it asks for them, and refuses where its signal stacks
// are too small or the kernel or its configuration does not know them. Granted once, it holds for every thread.
bool tile_registers_granted() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

struct Processor {
  bool v3 = false, v4 = false, bf16 = false, amx = false;
  bool intel = cpuid(0).ebx == 0x756E6547;  // "Genu" of GenuineIntel

  Processor() {
    const Registers basic = cpuid(1), extended = cpuid(7), extended1 = cpuid(7, 1), amd = cpuid(0x80000001);
    if (!has(basic.ecx, {27})) return;  // OSXSAVE: xgetbv exists
    const std::uint64_t states = saved_states();
    // x86-64-v3 beyond v2: FMA, MOVBE, AVX, F16C; BMI1, AVX2, BMI2; LZCNT; the ymm registers.
    v3 = has(basic.ecx, {0, 9, 12, 13, 19, 20, 22, 23, 28, 29}) && has(extended.ebx, {3, 5, 8}) &&
         has(amd.ecx, {0, 5}) && has(states, {1, 2});
    // x86-64-v4: AVX512F, DQ, CD, BW, VL; the mask and zmm registers.
    v4 = v3 && has(extended.ebx, {16, 17, 28, 30, 31}) && has(states, {5, 6, 7});
    bf16 = v4 && has(extended1.eax, {5});
    // AMX-BF16 and AMX-TILE.
    amx = bf16 && has(extended.edx, {22, 24}) && tile_registers_granted();
  }
};

const Processor& processor() {
  static const Processor found;
  return found;
}

}  // namespace
#endif

#if defined(__aarch64__)
namespace {

// Where Linux tells of them, the bf16 instructions (FEAT_BF16), and what compilers use of Armv8.2 beside them.
bool has_neon_bf16() {
#if defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which glibc 2.28 does not name
  constexpr unsigned long kArmv8 = HWCAP_ASIMD | HWCAP_CRC32 | HWCAP_ATOMICS | HWCAP_ASIMDRDM;
  return (getauxval(AT_HWCAP2) & kBf16) != 0 && (getauxval(AT_HWCAP) & kArmv8) == kArmv8;
#else
  return false;
#endif
}

}  // namespace
#endif

const std::vector<std::string>& known_cpu_isas() {
  static const std::vector<std::string> isas{"portable", "neon",        "neon_bf16", "avx2",
                                             "avx512",   "avx512_bf16", "avx512_amx"};
  return isas;
}

bool cpu_supports(const std::string& isa) {
  if (isa == "portable") return true;
#if defined(__x86_64__)
  if (isa == "avx2") return processor().v3;
  if (isa == "avx512") return processor().v4;
  if (isa == "avx512_bf16") return processor().bf16;
  if (isa == "avx512_amx") return processor().amx;
#elif defined(__aarch64__)
  if (isa == "neon") return true;
  if (isa == "neon_bf16") return has_neon_bf16();
#endif
  return false;
}

bool cpu_prefers(const std::string& isa) {
#if defined(__x86_64__)
  if (isa == "avx512_bf16" && processor().intel) return false;
#endif
  return cpu_supports(isa);
}

}  // namespace flashsdk
