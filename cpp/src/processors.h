// How many processors this process should keep busy.
#pragma once

namespace flashsdk {

inline constexpr int kMaxThreads = 4096;

// FLASHSDK_NUM_THREADS, else OMP_NUM_THREADS, else those the scheduler and the container's quota give. At least 1.
int default_num_threads();

}  // namespace flashsdk
