// The context that the driver's own calls need. Implemented in cuda/host/context.cpp, without a link to the driver.
#pragma once

namespace flashsdk::cuda {

// Gives the calling thread the context of a device that is current, where the thread has none yet. The runtime does so
// itself at the first call that needs one; the driver does not, and a thread whose first call makes a TMA descriptor
// would be refused (CUDA_ERROR_INVALID_CONTEXT). A context that the thread has, the caller's own too, is left alone.
void bind_context(int device);

}  // namespace flashsdk::cuda
