// Random problems.
#pragma once

#include <random>

namespace flashsdk::testing {

using Rng = std::mt19937;

inline int between(Rng& rng, int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

}  // namespace flashsdk::testing
