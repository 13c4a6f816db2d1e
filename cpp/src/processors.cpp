#include "processors.h"

#include <dlfcn.h>
#include <link.h>
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"

namespace flashsdk {
namespace {

// Everybody's: the first number of "8" or "8,4"; 0 when there is none.
int from_openmp() {
  const char* text = std::getenv("OMP_NUM_THREADS");
  if (text == nullptr) return 0;
  const long n = std::strtol(text, nullptr, 10);
  return n > 0 ? static_cast<int>(std::min<long>(n, kMaxThreads)) : 0;
}

int from_affinity() {
  cpu_set_t set;
  return processors_given(set) ? CPU_COUNT(&set) : static_cast<int>(std::thread::hardware_concurrency());
}

// Adds the places of an OpenMP runtime: what it bound the first thread to says no longer what the process was given.
void add_places(const std::string& library, cpu_set_t& set) {
  void* runtime = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (runtime == nullptr) return;
  const auto count = reinterpret_cast<int (*)()>(dlsym(runtime, "omp_get_num_places"));
  const auto size = reinterpret_cast<int (*)(int)>(dlsym(runtime, "omp_get_place_num_procs"));
  const auto list = reinterpret_cast<void (*)(int, int*)>(dlsym(runtime, "omp_get_place_proc_ids"));
  const int places = count != nullptr && size != nullptr && list != nullptr ? count() : 0;  // 0: nothing is pinned
  for (int place = 0; place < places; ++place) {
    std::vector<int> processors(static_cast<std::size_t>(std::max(size(place), 0)));
    list(place, processors.data());
    for (const int p : processors)
      if (p >= 0 && p < CPU_SETSIZE) CPU_SET(p, &set);
  }
  dlclose(runtime);
}

// OpenMP's runtimes in this process, whichever library brought them. Names may have a hash in them.
std::vector<std::string> openmp_runtimes() {
  std::vector<std::string> found;
  const auto look_at = [](dl_phdr_info* library, std::size_t, void* names) {
    const std::string_view path = library->dlpi_name;
    const std::string_view name = path.substr(path.rfind('/') + 1);
    for (const std::string_view runtime : {"libgomp", "libomp", "libiomp"})
      if (name.substr(0, runtime.size()) == runtime) static_cast<std::vector<std::string>*>(names)->emplace_back(path);
    return 0;
  };
  dl_iterate_phdr(look_at, &found);  // no more under its lock than to look
  return found;
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

int chosen_num_threads() {
  constexpr const char* kName = "FLASHSDK_NUM_THREADS";
  const char* text = std::getenv(kName);
  if (text == nullptr || *text == '\0') return 0;
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, n);
  // Ours alone, so that anything but a number of threads is a mistake.
  if (error != std::errc() || rest != end || n < 1 || n > kMaxThreads)
    fail(kName, shown(text), "1 to " + std::to_string(kMaxThreads));
  return n;
}

bool processors_given(cpu_set_t& set) {
  if (sched_getaffinity(0, sizeof set, &set) != 0) return false;
  for (const std::string& runtime : openmp_runtimes()) add_places(runtime, set);
  return true;
}

int default_num_threads() {
  if (const int n = from_openmp()) return n;
  int n = from_affinity();
  if (const double quota = cgroup_quota(); quota > 0) n = std::min(n, static_cast<int>(std::ceil(quota)));
  return std::clamp(n, 1, kMaxThreads);
}

}  // namespace flashsdk
