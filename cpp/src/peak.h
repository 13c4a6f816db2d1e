// What the arithmetic units can do at most: the yardstick that benchmarks hold the kernels against.
#pragma once

#include <string>

namespace flashsdk {

enum class PeakKind {
  kFp32,     // multiply-add
  kBf16Dot,  // bf16 pairs or tiles accumulated in fp32; fp32 multiply-add where the instruction set has neither
};

// GFLOP/s of num_threads threads that issue independent multiply-adds of `isa` and nothing else for about `seconds`.
double measure_peak(PeakKind kind, const std::string& isa, int num_threads, double seconds);

}  // namespace flashsdk
