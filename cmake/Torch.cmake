# What is for PyTorch, none of which the core knows: its operators in C++, as libflashsdk_torch for programs without
# Python and inside of flashsdk._torch_native, which is eager calls without Python in between.
set(FLASHSDK_BUILD_TORCH AUTO CACHE STRING "What is for PyTorch: AUTO (where Python has PyTorch 2.11 or newer), ON or OFF")
set_property(CACHE FLASHSDK_BUILD_TORCH PROPERTY STRINGS AUTO ON OFF)
set(FLASHSDK_TORCH_DIR "" CACHE PATH
  "PyTorch's folder; then only libflashsdk_torch is built with it. Empty: the PyTorch of Python_EXECUTABLE")
set(FLASHSDK_OLDEST_TORCH 2.11)
set(FLASHSDK_NEWEST_TORCH 2.14)  # of _torch_native, by its release series

string(TOUPPER "${FLASHSDK_BUILD_TORCH}" wanted)
if(wanted MATCHES "^(OFF|NO|FALSE|N|0)$")
  return()
elseif(NOT wanted MATCHES "^(AUTO|ON|YES|TRUE|Y|1)$")
  message(FATAL_ERROR "FLASHSDK_BUILD_TORCH: ${FLASHSDK_BUILD_TORCH}; AUTO, ON or OFF")
endif()

if(NOT FLASHSDK_BUILD_PYTHON)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
endif()
# Found, and not imported, which takes seconds.
set(torch_dir "${FLASHSDK_TORCH_DIR}")
if(Python_EXECUTABLE AND NOT torch_dir)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('torch'); print(list(s.submodule_search_locations)[0])"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE torch_dir ERROR_QUIET)
endif()
set(torch_version "")
if(torch_dir AND EXISTS ${torch_dir}/version.py)
  file(STRINGS ${torch_dir}/version.py line REGEX "^__version__ = '" LIMIT_COUNT 1)
  string(REGEX MATCH "'(.*)'" line "${line}")
  set(torch_version ${CMAKE_MATCH_1})
endif()
set(missing "")
if(NOT torch_version)
  set(missing "no PyTorch in ${Python_EXECUTABLE}")
  if(FLASHSDK_TORCH_DIR)
    set(missing "no PyTorch in ${FLASHSDK_TORCH_DIR}")
  endif()
elseif(torch_version VERSION_LESS FLASHSDK_OLDEST_TORCH)
  set(missing "PyTorch ${torch_version}; ${FLASHSDK_OLDEST_TORCH} or newer is needed")
elseif(NOT EXISTS ${torch_dir}/include/torch/csrc/autograd/python_variable.h OR
       NOT EXISTS ${torch_dir}/lib/libtorch_python.so)
  set(missing "PyTorch without its headers in ${torch_dir}")
endif()
if(missing)
  if(NOT wanted STREQUAL "AUTO")
    message(FATAL_ERROR "FLASHSDK_BUILD_TORCH: ${FLASHSDK_BUILD_TORCH}, but ${missing}")
  endif()
  message(STATUS "PyTorch: left out, ${missing}")
  return()
endif()
message(STATUS "PyTorch: ${torch_version}")

# The operators' schemas are a file that Python reads, and C++ has a copy of.
set(schema_file python/flashsdk/_torch_schemas.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${schema_file})
file(READ ${schema_file} schemas)
string(REGEX REPLACE "([^\n]+)\n" "    R\"(\\1)\",\n" schemas "${schemas}")
configure_file(cmake/torch_schemas.h.in generated/torch/torch_schemas.h @ONLY)

# Through the stable ABI, and only what PyTorch 2.11 has of it: later ones keep to that.
add_library(flashsdk_torch_operators OBJECT EXCLUDE_FROM_ALL cpp/torch/operators.cpp)
target_compile_definitions(flashsdk_torch_operators PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
target_include_directories(flashsdk_torch_operators
  PUBLIC ${PROJECT_SOURCE_DIR}/cpp/src ${PROJECT_SOURCE_DIR}/cpp/include ${PROJECT_SOURCE_DIR}/cpp/torch
         ${PROJECT_BINARY_DIR}/generated/include
  PRIVATE ${PROJECT_BINARY_DIR}/generated/torch)
target_include_directories(flashsdk_torch_operators SYSTEM PUBLIC
  ${torch_dir}/include ${torch_dir}/include/torch/csrc/api/include)
target_link_libraries(flashsdk_torch_operators PRIVATE flashsdk_warnings)

if(BUILD_SHARED_LIBS)
  set(on_gpu 0)  # a PyTorch for CPUs alone has no streams to ask for
  if(FLASHSDK_CUDA_ENABLED AND EXISTS ${torch_dir}/lib/libtorch_cuda.so)
    set(on_gpu 1)
  endif()
  add_library(flashsdk_torch SHARED cpp/torch/library.cpp)
  target_compile_definitions(flashsdk_torch PRIVATE
    TORCH_TARGET_VERSION=0x020b000000000000 FLASHSDK_TORCH_ON_GPU=${on_gpu} $<${on_gpu}:USE_CUDA>)
  target_link_libraries(flashsdk_torch PRIVATE flashsdk_torch_operators flashsdk_warnings flashsdk
    ${FLASHSDK_SANITIZE_LINK} ${torch_dir}/lib/libtorch_cpu.so $<${on_gpu}:${torch_dir}/lib/libtorch_cuda.so>)
  # libtorch is the program's, of any release from 2.11 on.
  set_target_properties(flashsdk_torch PROPERTIES INSTALL_RPATH $ORIGIN)
  # PyTorch keeps its kernels: unloading would take the code away under them.
  target_link_options(flashsdk_torch PRIVATE LINKER:-z,nodelete)
  install(TARGETS flashsdk_torch LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endif()

if(NOT FLASHSDK_BUILD_PYTHON OR FLASHSDK_TORCH_DIR)
  return()
endif()
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_series "${torch_version}")
if(wanted STREQUAL "AUTO" AND torch_series VERSION_GREATER FLASHSDK_NEWEST_TORCH)
  message(STATUS "PyTorch: _torch_native left out, it knows PyTorch up to ${FLASHSDK_NEWEST_TORCH}; "
                 "FLASHSDK_BUILD_TORCH=ON tries")
  return()
endif()
# libtorch's C++ interface changes with each release, so this is for the PyTorch of Python_EXECUTABLE alone; with any
# other, flashsdk.torch does without it.
set(eager cpp/torch_eager)
Python_add_library(_torch_native MODULE WITH_SOABI ${eager}/module.cpp ${eager}/functions.cpp ${eager}/arguments.cpp
  ${eager}/core_call.cpp ${eager}/node.cpp ${eager}/operator_call.cpp ${eager}/sdpa.cpp ${eager}/sdpa_call.cpp
  ${eager}/skip_autograd.cpp)
# Compiled as one: PyTorch's headers are nearly all of what each takes.
set_target_properties(_torch_native PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
target_include_directories(_torch_native PRIVATE cpp/python ${eager})
target_compile_definitions(_torch_native PRIVATE FLASHSDK_TORCH_VERSION="${torch_version}")
# The core is the extension's, through a table of functions: a second one would have threads of its own.
target_link_libraries(_torch_native PRIVATE flashsdk_torch_operators flashsdk_warnings ${FLASHSDK_SANITIZE_LINK}
  ${torch_dir}/lib/libtorch_python.so ${torch_dir}/lib/libtorch_cpu.so ${torch_dir}/lib/libc10.so)
# Whoever builds the one wants both: demo, test_gpu.py.
add_dependencies(_bindings _torch_native)
# torch has been imported before, and with it what this links.
set_target_properties(_torch_native PROPERTIES SKIP_BUILD_RPATH ON)

if(SKBUILD)
  install(TARGETS _torch_native LIBRARY DESTINATION flashsdk COMPONENT python EXCLUDE_FROM_ALL)
else()
  set_target_properties(_torch_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FLASHSDK_EXTENSION_DIR})
endif()
