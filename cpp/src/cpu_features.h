// What the processor can do, under the names that kernels give their instruction sets.
#pragma once

#include <string>
#include <vector>

namespace flashsdk {

// Every instruction set that a kernel may be compiled for, slowest first, whether or not this build has it.
const std::vector<std::string>& known_cpu_isas();

// Whether the processor and the operating system run code for it. False for an unknown name.
bool cpu_supports(const std::string& isa);

}  // namespace flashsdk
