// Symbols are hidden by default; what is marked FLASHSDK_API is the library's ABI.
#pragma once

#if defined(__GNUC__)
#define FLASHSDK_API __attribute__((visibility("default")))
#else
#error "flashsdk supports GCC and Clang"
#endif
