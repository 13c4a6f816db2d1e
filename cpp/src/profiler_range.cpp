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

void begin_range(const char* name) noexcept {
  if (domain() == nullptr) return;
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &event);
}

void end_range() noexcept {
  if (domain() != nullptr) nvtxDomainRangePop(domain());
}
#else
void begin_range(const char*) noexcept {}
void end_range() noexcept {}
#endif

}  // namespace flashsdk
