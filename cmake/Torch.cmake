# What is for PyTorch, none of which the core knows: its operators in C++, as libflashsdk_torch for programs without
# Python and inside of flashsdk._torch_native, which is eager calls without Python in between.
set(FLASHSDK_BUILD_TORCH AUTO CACHE STRING "What is for PyTorch: AUTO (where Python has PyTorch 2.11 or newer), ON or OFF")
set_property(CACHE FLASHSDK_BUILD_TORCH PROPERTY STRINGS AUTO ON OFF)
set(FLASHSDK_TORCH_DIR "" CACHE PATH
  "PyTorch's folder; then only libflashsdk_torch is built with it. Empty: the PyTorch of Python_EXECUTABLE")
set(FLASHSDK_TORCH_PYTHONS "" CACHE STRING
  "Pythons that have a PyTorch each: _torch_native as wheels have it, for each. Empty: for Python_EXECUTABLE alone")
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
# Of the PyTorch in `dir`: torch_version, torch_series, what is `missing` of it (called `of` in that), and torch_served,
# the PyTorch that what is compiled with it is for. Of a release all of its series, of a nightly that alone.
macro(flashsdk_look_at_torch dir of)
  set(torch_version "")
  if(EXISTS ${dir}/version.py)
    file(STRINGS ${dir}/version.py line REGEX "^__version__ = '" LIMIT_COUNT 1)
    string(REGEX MATCH "'(.*)'" line "${line}")
    set(torch_version ${CMAKE_MATCH_1})
  endif()
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_series "${torch_version}")
  set(torch_served "${torch_version}")
  if(torch_version MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+(\\+.*)?$")
    set(torch_served ${torch_series})
  endif()
  set(missing "")
  if(NOT torch_version)
    set(missing "no PyTorch in ${of}")
  elseif(torch_version VERSION_LESS FLASHSDK_OLDEST_TORCH)
    set(missing "PyTorch ${torch_version}; ${FLASHSDK_OLDEST_TORCH} or newer is needed")
  elseif(NOT EXISTS ${dir}/include/torch/csrc/autograd/python_variable.h OR
         NOT EXISTS ${dir}/lib/libtorch_python.so)
    set(missing "PyTorch without its headers in ${dir}")
  endif()
endmacro()

if(FLASHSDK_TORCH_DIR)
  flashsdk_look_at_torch("${torch_dir}" "${torch_dir}")
else()
  flashsdk_look_at_torch("${torch_dir}" "${Python_EXECUTABLE}")
endif()
if(missing)
  if(NOT wanted STREQUAL "AUTO" OR FLASHSDK_TORCH_PYTHONS)
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

# The operators, compiled with the headers of the PyTorch in `dir`: flashsdk_torch_operators_<version>. Through the
# stable ABI, and only what PyTorch 2.11 has of it: later ones keep to that. Still each release has its own, as inline
# functions of two releases must not meet in one library.
function(flashsdk_add_torch_operators version dir)
  set(target flashsdk_torch_operators_${version})
  if(TARGET ${target})
    return()
  endif()
  add_library(${target} OBJECT EXCLUDE_FROM_ALL cpp/torch/operators.cpp)
  target_compile_definitions(${target} PRIVATE TORCH_TARGET_VERSION=0x020b000000000000)
  target_include_directories(${target}
    PUBLIC ${PROJECT_SOURCE_DIR}/cpp/src ${PROJECT_SOURCE_DIR}/cpp/include ${PROJECT_SOURCE_DIR}/cpp/torch
           ${PROJECT_BINARY_DIR}/generated/include
    PRIVATE ${PROJECT_BINARY_DIR}/generated/torch)
  target_include_directories(${target} SYSTEM PUBLIC ${dir}/include ${dir}/include/torch/csrc/api/include)
  target_link_libraries(${target} PRIVATE flashsdk_warnings)
endfunction()
flashsdk_add_torch_operators(${torch_version} "${torch_dir}")

if(BUILD_SHARED_LIBS)
  set(on_gpu 0)  # a PyTorch for CPUs alone has no streams to ask for
  if(FLASHSDK_CUDA_ENABLED AND EXISTS ${torch_dir}/lib/libtorch_cuda.so)
    set(on_gpu 1)
  endif()
  add_library(flashsdk_torch SHARED cpp/torch/library.cpp)
  target_compile_definitions(flashsdk_torch PRIVATE
    TORCH_TARGET_VERSION=0x020b000000000000 FLASHSDK_TORCH_ON_GPU=${on_gpu} $<${on_gpu}:USE_CUDA>)
  target_link_libraries(flashsdk_torch PRIVATE flashsdk_torch_operators_${torch_version} flashsdk_warnings flashsdk
    ${FLASHSDK_SANITIZE_LINK} ${torch_dir}/lib/libtorch_cpu.so $<${on_gpu}:${torch_dir}/lib/libtorch_cuda.so>)
  # libtorch is the program's, of any release from 2.11 on.
  set_target_properties(flashsdk_torch PROPERTIES INSTALL_RPATH $ORIGIN)
  # PyTorch keeps its kernels: unloading would take the code away under them.
  target_link_options(flashsdk_torch PRIVATE LINKER:-z,nodelete)
  install(TARGETS flashsdk_torch LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endif()

if(NOT FLASHSDK_BUILD_PYTHON)
  return()
endif()

# _torch_native, made of `target`, with the PyTorch in `dir` that flashsdk_look_at_torch was asked of.
function(flashsdk_make_torch_native target dir)
  set(eager ${PROJECT_SOURCE_DIR}/cpp/torch_eager)
  target_sources(${target} PRIVATE ${eager}/module.cpp ${eager}/functions.cpp ${eager}/arguments.cpp
    ${eager}/core_call.cpp ${eager}/node.cpp ${eager}/operator_call.cpp ${eager}/sdpa.cpp ${eager}/sdpa_call.cpp
    ${eager}/skip_autograd.cpp)
  # Compiled as one: PyTorch's headers are nearly all of what each takes.
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cpp/python ${eager})
  target_compile_definitions(${target} PRIVATE FLASHSDK_TORCH_VERSION="${torch_served}")
  flashsdk_add_torch_operators(${torch_version} "${dir}")
  # The core is the extension's, through a table of functions: a second one would have threads of its own.
  target_link_libraries(${target} PRIVATE flashsdk_torch_operators_${torch_version} flashsdk_warnings
    ${FLASHSDK_SANITIZE_LINK} ${dir}/lib/libtorch_python.so ${dir}/lib/libtorch_cpu.so ${dir}/lib/libc10.so)
  # torch has been imported before, and with it what this links.
  set_target_properties(${target} PROPERTIES SKIP_BUILD_RPATH ON)
  # Whoever builds the one wants both: demo, test_gpu.py.
  add_dependencies(_bindings ${target})
endfunction()

# Of a wheel: one for each Python and each series of PyTorch, flashsdk/_torch/<series>/_torch_native.<of the Python>.so.
foreach(python IN LISTS FLASHSDK_TORCH_PYTHONS)
  # Without the variables by which pip hides packages from the Python that builds.
  execute_process(
    COMMAND ${python} -E -c
      "import importlib.util as u, sysconfig as s
print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), *u.find_spec('torch').submodule_search_locations, sep=';')"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE found ERROR_QUIET)
  list(LENGTH found count)
  if(NOT count EQUAL 3)
    message(FATAL_ERROR "FLASHSDK_TORCH_PYTHONS: no PyTorch in ${python}")
  endif()
  list(GET found 0 include)
  list(GET found 1 suffix)
  list(GET found 2 dir)
  flashsdk_look_at_torch("${dir}" "${python}")
  if(missing)
    message(FATAL_ERROR "FLASHSDK_TORCH_PYTHONS: ${missing}")
  elseif(NOT torch_served STREQUAL torch_series)
    message(FATAL_ERROR "FLASHSDK_TORCH_PYTHONS: PyTorch ${torch_version} of ${python} is no release")
  endif()
  message(STATUS "PyTorch: _torch_native for ${torch_series} of ${python}")
  set(target _torch_native_${torch_series}${suffix})
  add_library(${target} MODULE)
  target_include_directories(${target} SYSTEM PRIVATE ${include})
  flashsdk_make_torch_native(${target} "${dir}")
  set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME _torch_native SUFFIX ${suffix})
  set(folder _torch/${torch_series})
  if(SKBUILD)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${folder})
    install(TARGETS ${target} LIBRARY DESTINATION flashsdk/${folder} COMPONENT python EXCLUDE_FROM_ALL)
  else()
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FLASHSDK_EXTENSION_DIR}/${folder})
  endif()
endforeach()

if(FLASHSDK_TORCH_PYTHONS OR FLASHSDK_TORCH_DIR)
  return()
endif()
if(wanted STREQUAL "AUTO" AND torch_series VERSION_GREATER FLASHSDK_NEWEST_TORCH)
  message(STATUS "PyTorch: _torch_native left out, it knows PyTorch up to ${FLASHSDK_NEWEST_TORCH}; "
                 "FLASHSDK_BUILD_TORCH=ON tries")
  return()
endif()
# Of a build from source: for Python_EXECUTABLE and its PyTorch. With any other flashsdk.torch does without it.
Python_add_library(_torch_native MODULE WITH_SOABI)
flashsdk_make_torch_native(_torch_native "${torch_dir}")
if(SKBUILD)
  install(TARGETS _torch_native LIBRARY DESTINATION flashsdk COMPONENT python EXCLUDE_FROM_ALL)
else()
  set_target_properties(_torch_native PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FLASHSDK_EXTENSION_DIR})
endif()
