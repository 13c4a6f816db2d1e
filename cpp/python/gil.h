// Calls without the GIL, which survive an interpreter that ends meanwhile; and what a Python without a GIL asks.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <atomic>

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

// An object that the first call makes, and that is never given back. Null where make() failed, with Python's error set.
// Declare it `static constinit`: any other static has threads wait for the first one while Python believes that they
// run. The first may have given the GIL away or, in a Python without one, wait until all threads have stopped: neither
// would go on. Here both make it, and one is kept.
class MadeOnce {
 public:
  template <class Make>
  PyObject* get(Make make) {
    PyObject* kept = object_.load(std::memory_order_acquire);
    if (kept != nullptr) return kept;
    PyObject* const made = make();
    if (made == nullptr || object_.compare_exchange_strong(kept, made, std::memory_order_acq_rel)) return made;
    Py_DECREF(made);
    return kept;
  }

 private:
  std::atomic<PyObject*> object_{nullptr};
};

}  // namespace flashsdk::python
