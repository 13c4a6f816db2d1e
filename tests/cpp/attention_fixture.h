// The suite of whole calls of attention, which ctest runs once for each instruction set.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "flashsdk/flashsdk.h"

namespace flashsdk::testing {

// Skips where the instruction set that was asked for is not this processor's.
class Attention : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* forced = std::getenv("FLASHSDK_CPU_ISA");
    if (forced == nullptr) return;
    try {
      ASSERT_EQ(build_info().cpu_isa, forced);
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
};

}  // namespace flashsdk::testing
