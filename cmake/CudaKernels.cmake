# GPU kernels: a file a tile, from the tables in cpp/kernels/table.
include(KernelSources)

set(FLASHSDK_CUDA_SUBSET all CACHE STRING "Which GPU kernels: all, or ci (a few of every kind, quick to compile)")
set_property(CACHE FLASHSDK_CUDA_SUBSET PROPERTY STRINGS all ci)
set(FLASHSDK_CUDA_DTYPES "" CACHE STRING
  "Data types of the GPU kernels, part of: float16 bfloat16; empty: those of the subset")
set(FLASHSDK_CUDA_HEAD_DIMS "" CACHE STRING
  "Head dimensions of the GPU kernels, part of: 32 64 96 128 192 256 576; empty: those of the subset")

# An object library of kernels, for architectures of its own where any are given.
function(flashsdk_add_cuda_objects target sources)
  add_library(${target} OBJECT ${sources})
  target_link_libraries(${target} PRIVATE flashsdk_kernels flashsdk_cutlass)
  target_compile_options(${target} PRIVATE
    --expt-relaxed-constexpr --expt-extended-lambda -Xptxas=-v -Xcompiler=-fvisibility=hidden)
  if(ARGN)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${ARGN}")
  endif()
endfunction()

# Appends the objects to FLASHSDK_KERNEL_OBJECTS. Call it after flashsdk_add_cpu_kernels(), where FLASHSDK_CUDA_ENABLED.
function(flashsdk_add_cuda_kernels)
  flashsdk_write_sources(gpu cuda
    CMAKE_CUDA_ARCHITECTURES FLASHSDK_CUDA_SUBSET FLASHSDK_CUDA_DTYPES FLASHSDK_CUDA_HEAD_DIMS)
  find_package(CUDAToolkit REQUIRED)

  set(one_architecture "")
  if(FLASHSDK_CUDA_SUBSET STREQUAL "ci")
    list(GET CMAKE_CUDA_ARCHITECTURES 0 one_architecture)
  endif()
  set(shared ${PROJECT_SOURCE_DIR}/cpp/kernels/cuda/cache/kv_append.cu)
  # No product is fused with a sum, as in kv_append.cpp.
  set_source_files_properties(${shared} PROPERTIES COMPILE_OPTIONS -fmad=false)
  flashsdk_add_cuda_objects(flashsdk_cuda "${SOURCES_sm80};${shared}" ${one_architecture})
  set(objects $<TARGET_OBJECTS:flashsdk_cuda> $<TARGET_OBJECTS:flashsdk_cuda_host>)
  # The host's part: no CUTLASS, compiled by the C++ compiler.
  add_library(flashsdk_cuda_host OBJECT ${SOURCES_table} ${PROJECT_SOURCE_DIR}/cpp/kernels/cuda/host/device.cpp
    ${PROJECT_SOURCE_DIR}/cpp/kernels/cuda/host/context.cpp)
  target_link_libraries(flashsdk_cuda_host PRIVATE flashsdk_kernels flashsdk_warnings CUDA::cudart_static)
  if(SOURCES_sm90)
    flashsdk_add_cuda_objects(flashsdk_cuda_sm90 "${SOURCES_sm90}" 90a-real)
    target_sources(flashsdk_cuda_host PRIVATE ${PROJECT_SOURCE_DIR}/cpp/kernels/sm90/tensor_map.cpp)
    list(APPEND objects $<TARGET_OBJECTS:flashsdk_cuda_sm90>)
  endif()

  # Single kernels for tests/cpp/gpu, without the CPU's.
  add_library(flashsdk_gpu_harness SHARED EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/cpp/gpu/harness.cpp
    ${PROJECT_SOURCE_DIR}/cpp/src/tensor.cpp ${objects})
  target_link_libraries(flashsdk_gpu_harness PRIVATE flashsdk_kernels CUDA::cudart_static)

  list(LENGTH SOURCES_sm80 sm80_files)
  list(LENGTH SOURCES_sm90 sm90_files)
  message(STATUS "GPU kernels: ${sm80_files} files, and ${sm90_files} for sm_90a")
  set(FLASHSDK_KERNEL_OBJECTS ${FLASHSDK_KERNEL_OBJECTS} ${objects} PARENT_SCOPE)
endfunction()
