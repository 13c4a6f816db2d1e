# libflashsdk_jax: attention as XLA's custom calls, which flashsdk.jax loads. It needs three headers of XLA, none of
# which are part of this repository, from the first of these places that has them:
#   1. FLASHSDK_XLA_INCLUDE_DIR: any folder that holds xla/ffi/api/ffi.h
#   2. the jaxlib of Python_EXECUTABLE
#   3. jaxlib's pinned wheel, downloaded by pip into the build folder: where FLASHSDK_BUILD_JAX is ON, and in pip's builds
# XLA runs what was built with its own headers or with older ones, so that the pinned wheel is the oldest supported.
set(FLASHSDK_BUILD_JAX AUTO CACHE STRING "What is for JAX: AUTO (where XLA's headers are found), ON or OFF")
set_property(CACHE FLASHSDK_BUILD_JAX PROPERTY STRINGS AUTO ON OFF)
set(FLASHSDK_XLA_INCLUDE_DIR "" CACHE PATH "Where xla/ffi/api/ffi.h is")
set(oldest_jaxlib 0.8.0)
set(downloads ${PROJECT_BINARY_DIR}/jaxlib)

string(TOUPPER "${FLASHSDK_BUILD_JAX}" wanted)
if(wanted MATCHES "^(OFF|NO|FALSE|N|0)$" OR NOT FLASHSDK_BUILD_PYTHON)
  return()
elseif(NOT wanted MATCHES "^(AUTO|ON|YES|TRUE|Y|1)$")
  message(FATAL_ERROR "FLASHSDK_BUILD_JAX: ${FLASHSDK_BUILD_JAX}; AUTO, ON or OFF")
endif()

set(xla_include_dir "")
if(FLASHSDK_XLA_INCLUDE_DIR)
  if(NOT EXISTS ${FLASHSDK_XLA_INCLUDE_DIR}/xla/ffi/api/ffi.h)
    message(FATAL_ERROR "FLASHSDK_XLA_INCLUDE_DIR: ${FLASHSDK_XLA_INCLUDE_DIR}; no xla/ffi/api/ffi.h in it")
  endif()
  set(xla_include_dir ${FLASHSDK_XLA_INCLUDE_DIR})
else()
  # Found, and not imported, which takes time.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u; s = u.find_spec('jaxlib'); print(list(s.submodule_search_locations)[0])"
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE jaxlib_dir ERROR_QUIET)
  foreach(folder IN ITEMS ${jaxlib_dir}/include ${downloads}/jaxlib/include)
    if(NOT xla_include_dir AND EXISTS ${folder}/xla/ffi/api/ffi.h)
      set(xla_include_dir ${folder})
    endif()
  endforeach()
endif()

if(NOT xla_include_dir AND (SKBUILD OR NOT wanted STREQUAL "AUTO"))
  message(STATUS "JAX: downloading jaxlib ${oldest_jaxlib} for XLA's headers")
  # Headers are the same for every Python and processor, wheels are not: one that exists is named. Without a network
  # this is not to hold up a build that may do without.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -m pip --retries 1 --timeout 10 download -q --no-deps --only-binary=:all:
      --python-version 3.12 --implementation cp --platform manylinux_2_27_x86_64 -d ${downloads} jaxlib==${oldest_jaxlib}
    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  file(GLOB archive ${downloads}/jaxlib-*.whl)
  if(archive AND NOT failed)
    file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${downloads} PATTERNS jaxlib/include)
    file(REMOVE ${archive})
    set(xla_include_dir ${downloads}/jaxlib/include)
  endif()
endif()

if(NOT xla_include_dir)
  if(NOT wanted STREQUAL "AUTO")
    message(FATAL_ERROR "FLASHSDK_BUILD_JAX: ${FLASHSDK_BUILD_JAX}, but there is no jaxlib in ${Python_EXECUTABLE}, and "
      "pip could not download it; set FLASHSDK_XLA_INCLUDE_DIR to the include folder of one, ${oldest_jaxlib} or newer")
  endif()
  message(STATUS "JAX: left out, no jaxlib in ${Python_EXECUTABLE}")
  return()
endif()
message(STATUS "JAX: XLA's headers in ${xla_include_dir}")

# No extension of Python: one library serves every version of it. The core is that of the extension, through a table of
# functions: a second one would have threads of its own.
add_library(flashsdk_jax MODULE cpp/jax/handlers.cpp)
target_include_directories(flashsdk_jax PRIVATE
  ${PROJECT_SOURCE_DIR}/cpp/include ${PROJECT_SOURCE_DIR}/cpp/src ${PROJECT_BINARY_DIR}/generated/include)
target_include_directories(flashsdk_jax SYSTEM PRIVATE ${xla_include_dir})
target_link_libraries(flashsdk_jax PRIVATE flashsdk_warnings ${FLASHSDK_SANITIZE_LINK})
# XLA keeps the addresses of its handlers.
target_link_options(flashsdk_jax PRIVATE LINKER:-z,nodelete)
# Whoever builds the one wants both: demo, test_gpu.py.
add_dependencies(_bindings flashsdk_jax)

if(SKBUILD)
  install(TARGETS flashsdk_jax LIBRARY DESTINATION flashsdk COMPONENT python EXCLUDE_FROM_ALL)
else()
  set_target_properties(flashsdk_jax PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FLASHSDK_EXTENSION_DIR})
endif()
