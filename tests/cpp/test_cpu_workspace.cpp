// Scratch memory of a thread, which launches on a CPU take and give back.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

#include "cpu_workspace.h"

namespace flashsdk::testing {
namespace {

struct Launch {
  std::size_t workspace_size;
  bool fails;
  mutable Workspace seen;

  void launch(const LaunchOptions& options) const {
    seen = options.workspace;
    // Of what is lent back many pages: the system counts some later.
    std::memset(static_cast<char*>(seen.data) + workspace_size - (std::size_t{16} << 20), 1, std::size_t{16} << 20);
    if (fails) throw std::runtime_error("failed");
  }
};

// Bytes of it that the system may take.
std::size_t lent(const Workspace& memory) {
  std::ifstream smaps("/proc/self/smaps");
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data);
  std::size_t kilobytes = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    std::uintptr_t begin, end;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) inside = begin <= at && at < end;
    if (inside && line.rfind("LazyFree:", 0) == 0) kilobytes += std::stoul(line.substr(9));
  }
  return kilobytes << 10;
}

TEST(CpuWorkspace, IsTrimmedHoweverALaunchEnds) {
  for (const bool fails : {false, true}) {
    const Launch big{std::size_t{96} << 20, fails, {}};
    if (fails) {
      EXPECT_THROW(launch_on_cpu(big, {}), std::runtime_error);
    } else {
      launch_on_cpu(big, {});
    }
    EXPECT_GE(big.seen.size, big.workspace_size);
    EXPECT_GT(lent(big.seen), 0u) << fails;
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // which ends a program that asks for so much
TEST(CpuWorkspace, LendsNothingWhereThereIsNoMemory) {
  launch_on_cpu(Launch{std::size_t{96} << 20, false, {}}, {});
  EXPECT_THROW(launch_on_cpu(Launch{std::size_t{1} << 60, false, {}}, {}), Error);
  const Launch again{std::size_t{96} << 20, false, {}};
  launch_on_cpu(again, {});
  EXPECT_NE(again.seen.data, nullptr);
}
#endif

}  // namespace
}  // namespace flashsdk::testing
