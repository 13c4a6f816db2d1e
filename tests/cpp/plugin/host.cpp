// Loads the plugin, calls it and closes it, three times. The library's threads live on, so its code has to.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

int main() {
  setenv("FLASHSDK_NUM_THREADS", "4", 1);
  for (int round = 0; round < 3; ++round) {
    void* plugin = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
    if (plugin == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    const auto attend = reinterpret_cast<int (*)()>(dlsym(plugin, "attend"));
    const auto code = reinterpret_cast<void* (*)()>(dlsym(plugin, "code"));
    if (attend == nullptr || code == nullptr || attend() != 0) return std::fprintf(stderr, "attend failed\n"), 1;
    void* const address = code();
    dlclose(plugin);
    if (Dl_info where; dladdr(address, &where) == 0) return std::fprintf(stderr, "the library was unmapped\n"), 1;
  }
  return std::puts("all good"), 0;
}
