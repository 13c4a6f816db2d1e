// New keys and values behind the used ones of a cache, on a GPU. Implemented in cuda/cache/kv_append.cu.
#pragma once

#include "common/append.h"

namespace flashsdk::cuda {

// p.used and p.pages.table are read by the kernel alone: what they contain is the caller's word.
void launch_kv_append(const AppendParams& p, void* stream);

}  // namespace flashsdk::cuda
