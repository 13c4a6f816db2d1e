// GPU kernels with policies of one's own: own_sm80.cu and own_sm90.cu compile them, test_own_kernels.cpp runs them.
#pragma once

#include "common/kernel_entry.h"

namespace flashsdk::testing {

struct OwnKernel {
  ForwardEntry forward;
  BackwardEntry backward;
};

// bfloat16, head_dim up to 64.
struct OwnKernels {
  OwnKernel dilated_window;  // custom_mask
  OwnKernel t5;              // custom_score, with any band
  OwnKernel factor;          // FactorPolicy, with any band
};
OwnKernels own_sm80();
OwnKernels own_sm90();

}  // namespace flashsdk::testing
