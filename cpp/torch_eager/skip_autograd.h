// Python has the operators' kernels for autograd. Where there is nothing to record, a call goes on without them: as in
// all that torch.compile has compiled, whose gradient is an operator of its own.
#pragma once

#include <Python.h>

namespace flashsdk::torch_eager {

// (name): puts itself before the operator's kernel for autograd, which has to be there. For good.
extern PyMethodDef const kSkipAutograd;

}  // namespace flashsdk::torch_eager
