// What flashsdk._torch_native has found of other modules, before any of its functions is called.
#pragma once

#include <ATen/dlpack.h>
#include <Python.h>

#include "core_api.h"

namespace flashsdk::torch_eager {

extern const CoreApi* g_core;
extern const DLPackExchangeAPI* g_exchange;  // nullptr: this PyTorch has none
extern PyObject *g_dense, *g_band;           // the classes

// Throws flashsdk.Error, as PyTorch hands on what Python raised.
[[noreturn]] void raise(const Failure& failure);

}  // namespace flashsdk::torch_eager
