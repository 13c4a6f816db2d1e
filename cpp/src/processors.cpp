#include "processors.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>

#include "check.h"

namespace flashsdk {
namespace {

// Ours alone, so that anything but a number of threads is a mistake; 0 when it is not set.
int from_flashsdk() {
  constexpr const char* kName = "FLASHSDK_NUM_THREADS";
  const char* text = std::getenv(kName);
  if (text == nullptr || *text == '\0') return 0;
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, n);
  if (error != std::errc() || rest != end || n < 1 || n > kMaxThreads)
    fail(kName, shown(text), "1 to " + std::to_string(kMaxThreads));
  return n;
}

// Everybody's: the first number of "8" or "8,4"; 0 when there is none.
int from_openmp() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  const long n = std::strtol(text, nullptr, 10);
  return n > 0 ? static_cast<int>(std::min<long>(n, kMaxThreads)) : 0;
}

int from_affinity() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::thread::hardware_concurrency());  // more processors than the set holds
}

// Processors' worth of time that "quota period" allows; 0 without a limit.
double quota_of(const std::string& cpu_max) {
  std::ifstream file(cpu_max);
  double quota, period;
  return file >> quota >> period && quota > 0 && period > 0 ? quota / period : 0;  // "max" is no number
}

double quota_v1() {
  double quota = 0, period = 0;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  return quota > 0 && period > 0 ? quota / period : 0;
}

// The tightest quota of this process's control group and those above it; 0 without a limit.
double cgroup_quota() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) != 0) continue;  // version 2
    std::string path = line.substr(3);
    double tightest = 0;
    for (;;) {
      const double quota = quota_of("/sys/fs/cgroup" + path + "/cpu.max");
      if (quota > 0) tightest = tightest > 0 ? std::min(tightest, quota) : quota;
      const std::size_t slash = path.rfind('/');
      if (path.size() <= 1 || slash == std::string::npos) break;
      path.resize(slash);
    }
    if (tightest > 0) return tightest;
  }
  return quota_v1();
}

}  // namespace

int default_num_threads() {
  if (const int n = from_flashsdk()) return n;
  if (const int n = from_openmp()) return n;
  int n = from_affinity();
  if (const double quota = cgroup_quota(); quota > 0) n = std::min(n, static_cast<int>(std::ceil(quota)));
  return std::clamp(n, 1, kMaxThreads);
}

}  // namespace flashsdk
