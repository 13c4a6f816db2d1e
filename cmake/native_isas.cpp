// Prints the instruction sets worth running on this machine as a CMake list, fastest first.
#include <cstdio>

#include "cpu_features.cpp"

int main() {
  const auto& isas = flashsdk::known_cpu_isas();
  for (auto isa = isas.rbegin(); isa != isas.rend(); ++isa) {
    if (flashsdk::cpu_prefers(*isa)) std::printf("%s%s", isa->c_str(), *isa == isas.front() ? "" : ";");
  }
}
