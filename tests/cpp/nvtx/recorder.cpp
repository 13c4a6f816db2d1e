// A profiler, as NVTX loads one: it keeps the names of the ranges that begin and end in our domain.
#include <nvtx3/nvToolsExt.h>

#include <cstring>
#include <mutex>
#include <string>

namespace {

std::mutex g_mutex;
std::string g_text;     // a line for each range that begins, and "end" for each that ends
char g_ours, g_others;  // whose addresses are the domains

nvtxDomainHandle_t NVTX_API create(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(std::strcmp(name, "flashsdk") == 0 ? &g_ours : &g_others);
}

int keep(nvtxDomainHandle_t domain, const char* line) {
  const std::lock_guard lock(g_mutex);
  if (reinterpret_cast<char*>(domain) == &g_ours) g_text.append(line).append("\n");
  return 0;
}
int NVTX_API push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* event) {
  return keep(domain, event->message.ascii);
}
int NVTX_API pop(nvtxDomainHandle_t domain) { return keep(domain, "end"); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* recorded() { return g_text.c_str(); }

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create);
  *table[NVTX_CBID_CORE2_DomainRangePushEx] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE2_DomainRangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
