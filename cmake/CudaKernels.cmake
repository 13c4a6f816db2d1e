# GPU kernels: one kernel a generated file, from the table in cpp/kernels/instantiate/sm80_table.cmake.
#
# flashsdk_add_cuda_kernels() writes build/generated/cuda/*.cu and the function that lists them, and appends the
# objects to FLASHSDK_KERNEL_OBJECTS. Call it after flashsdk_add_cpu_kernels(), where FLASHSDK_CUDA_ENABLED.
include(${PROJECT_SOURCE_DIR}/cpp/kernels/instantiate/sm80_table.cmake)

set(FLASHSDK_CUDA_SUBSET all CACHE STRING "Which GPU kernels: all, or ci (a few of every kind, quick to compile)")
set_property(CACHE FLASHSDK_CUDA_SUBSET PROPERTY STRINGS all ci)
if(FLASHSDK_CUDA_SUBSET STREQUAL "ci")
  set(default_dtypes ${FLASHSDK_SM80_CI_DTYPES})
  set(default_head_dims ${FLASHSDK_SM80_CI_HEAD_DIMS})
elseif(FLASHSDK_CUDA_SUBSET STREQUAL "all")
  set(default_dtypes ${FLASHSDK_SM80_ALL_DTYPES})
  set(default_head_dims ${FLASHSDK_SM80_ALL_HEAD_DIMS})
else()
  message(FATAL_ERROR "FLASHSDK_CUDA_SUBSET: ${FLASHSDK_CUDA_SUBSET}; allowed are all, ci")
endif()
set(FLASHSDK_CUDA_DTYPES "" CACHE STRING "Data types of the GPU kernels, part of: ${FLASHSDK_SM80_ALL_DTYPES}; empty: those of the subset")
set(FLASHSDK_CUDA_HEAD_DIMS "" CACHE STRING "Head dimensions of the GPU kernels, part of: ${FLASHSDK_SM80_ALL_HEAD_DIMS}; empty: those of the subset")

# Writes the kernel of one line of the table; appends to sources, DECLARATIONS and CALLS of the caller.
macro(flashsdk_cuda_kernel name entry)
  set(NAME ${name})  # a template sees variables, not a macro's arguments
  set(ENTRY "${entry}")
  configure_file(${PROJECT_SOURCE_DIR}/cpp/kernels/instantiate/sm80.cu.in
                 ${PROJECT_BINARY_DIR}/generated/cuda/${NAME}.cu @ONLY)
  list(APPEND sources ${PROJECT_BINARY_DIR}/generated/cuda/${NAME}.cu)
  string(APPEND DECLARATIONS "extern const KernelEntry ${NAME}[1];\n")
  string(APPEND CALLS "  table.add(${NAME}[0]);\n")
endmacro()

function(flashsdk_add_cuda_kernels)
  set(dtypes ${default_dtypes})
  set(head_dims ${default_head_dims})
  if(FLASHSDK_CUDA_DTYPES)
    set(dtypes ${FLASHSDK_CUDA_DTYPES})
  endif()
  if(FLASHSDK_CUDA_HEAD_DIMS)
    set(head_dims ${FLASHSDK_CUDA_HEAD_DIMS})
  endif()
  flashsdk_check_list(dtypes "${FLASHSDK_SM80_ALL_DTYPES}")
  flashsdk_check_list(head_dims "${FLASHSDK_SM80_ALL_HEAD_DIMS}")

  set(sources "")
  set(DECLARATIONS "")
  set(CALLS "")
  # The order is the priority: smallest head dimension first, its fastest tile first, without features before with.
  foreach(head_dim IN LISTS head_dims)
    foreach(op forward backward)
      foreach(dtype IN LISTS dtypes)
        foreach(policy Dense Band BlockSparse)
          foreach(features IN LISTS FLASHSDK_SM80_ALL_FEATURES)
            flashsdk_sm80_tiles(tiles ${op} ${head_dim} ${policy} ${features})
            foreach(tile IN LISTS tiles)
              string(REGEX MATCH "^[0-9]+x[0-9]+" size ${tile})
              string(REGEX REPLACE "[x_]" ", " arguments ${tile})
              if(op STREQUAL "forward")
                set(traits ForwardTraits)
              else()
                set(traits BackwardTraits)
              endif()
              set(compiled_in ${features})
              if(DEFINED FLASHSDK_SM80_FEATURES_${features})
                set(compiled_in ${FLASHSDK_SM80_FEATURES_${features}})
              endif()
              flashsdk_cuda_kernel(sm80_${op}_${dtype}_d${head_dim}_${policy}_${features}_${size}
                "sm80::${op}_entry<sm80::${traits}<${FLASHSDK_SM80_TYPE_${dtype}}, ${head_dim}, ${arguments}>, ${policy}Policy, cuda::Features::k${compiled_in}>()")
            endforeach()
          endforeach()
        endforeach()
      endforeach()
    endforeach()
  endforeach()
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " ARCHITECTURES)
  configure_file(${PROJECT_SOURCE_DIR}/cpp/kernels/instantiate/cuda_table.cpp.in
                 ${PROJECT_BINARY_DIR}/generated/cuda/cuda_table.cpp @ONLY)

  find_package(CUDAToolkit REQUIRED)
  add_library(flashsdk_cuda OBJECT ${sources})
  target_link_libraries(flashsdk_cuda PRIVATE flashsdk_kernels flashsdk_cutlass)
  target_compile_options(flashsdk_cuda PRIVATE --expt-relaxed-constexpr --expt-extended-lambda -Xptxas=-v
    -Xcompiler=-fvisibility=hidden)
  # The host's part: no CUTLASS, compiled by the C++ compiler.
  add_library(flashsdk_cuda_host OBJECT ${PROJECT_BINARY_DIR}/generated/cuda/cuda_table.cpp
    ${PROJECT_SOURCE_DIR}/cpp/kernels/cuda/device.cpp)
  target_link_libraries(flashsdk_cuda_host PRIVATE flashsdk_kernels flashsdk_warnings CUDA::cudart_static)

  # Single kernels for tests/cpp/gpu, without the CPU's.
  add_library(flashsdk_gpu_harness SHARED EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/cpp/gpu/harness.cpp
    ${PROJECT_SOURCE_DIR}/cpp/src/tensor.cpp $<TARGET_OBJECTS:flashsdk_cuda> $<TARGET_OBJECTS:flashsdk_cuda_host>)
  target_link_libraries(flashsdk_gpu_harness PRIVATE flashsdk_kernels CUDA::cudart_static)

  list(LENGTH sources count)
  message(STATUS "GPU kernels: ${count}; ${dtypes}; head_dim ${head_dims}")
  set(FLASHSDK_KERNEL_OBJECTS ${FLASHSDK_KERNEL_OBJECTS} $<TARGET_OBJECTS:flashsdk_cuda>
    $<TARGET_OBJECTS:flashsdk_cuda_host> PARENT_SCOPE)
endfunction()
