// What the processor can do, under the names that kernels give their instruction sets.
#pragma once

#include <string>
#include <vector>

namespace flashsdk {

// Every instruction set that a kernel may be compiled for, slowest first on its architecture, whether or not this build
// has it.
const std::vector<std::string>& known_cpu_isas();

// Whether the processor and the operating system run code for it. False for an unknown name.
bool cpu_supports(const std::string& isa);

// Whether it is also worth running. AVX512_BF16's dot product does twice the work of an fp32 FMA, at the same rate on
// AMD's Zen 4 and 5, but at a quarter of it on Intel (173 against 352 GFLOP/s on two cores of a Sapphire Rapids):
// there bf16 is faster converted to fp32. FLASHSDK_CPU_ISA=avx512_bf16 takes it all the same.
bool cpu_prefers(const std::string& isa);

}  // namespace flashsdk
