#include "profiler_range.h"

#if FLASHSDK_HAVE_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace flashsdk {

#if FLASHSDK_HAVE_NVTX
namespace {

// Null where no profiler listens, which is so for the whole life of a process.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("flashsdk");
  return made;
}

}  // namespace

ProfilerRange::ProfilerRange(const char* name) noexcept {
  if (domain() == nullptr) return;
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &event);
}

ProfilerRange::~ProfilerRange() {
  if (domain() != nullptr) nvtxDomainRangePop(domain());
}
#else
ProfilerRange::ProfilerRange(const char*) noexcept {}
ProfilerRange::~ProfilerRange() {}
#endif

}  // namespace flashsdk
