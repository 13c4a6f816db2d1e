// Calls without the GIL, which survive an interpreter that ends meanwhile.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace flashsdk::python {

// Gives the GIL back while it lives. A daemon thread may come back when the interpreter is ending: until Python 3.13
// that ends the thread by unwinding its stack, which no destructor and no noexcept function of the caller survives. So
// it sleeps here, as it would from Python 3.14 on, until the process is gone.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace flashsdk::python
