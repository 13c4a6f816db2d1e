// Prints the instruction sets that this machine needs, as a CMake list: the fastest that is worth running here, and
// where that one has kernels for some dtypes only, the next slower.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "cpu_features.cpp"
#include "table/cpu.h"

int main() {
  using namespace flashsdk;
  const auto& isas = known_cpu_isas();
  for (auto isa = isas.rbegin(); isa != isas.rend(); ++isa) {
    if (!cpu_prefers(*isa)) continue;
    std::printf("%s;", isa->c_str());
    if (std::all_of(std::begin(table::kCpuDTypes), std::end(table::kCpuDTypes),
                    [&](DType dtype) { return table::cpu_has(*isa, dtype); }))
      break;
  }
}
