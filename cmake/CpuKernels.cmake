# CPU kernels: one source, compiled for several instruction sets and chosen at run time, an object library for each.
include(CheckCXXSourceCompiles)
include(KernelSources)

set(FLASHSDK_CPU_FLAGS_portable -DFLASHSDK_PORTABLE_SIMD)
set(FLASHSDK_CPU_FLAGS_neon "")  # every 64-bit ARM processor has it
set(FLASHSDK_CPU_FLAGS_neon_bf16 -march=armv8.2-a+bf16)
set(FLASHSDK_CPU_FLAGS_avx2 -march=x86-64-v3)
set(FLASHSDK_CPU_FLAGS_avx512 -march=x86-64-v4 -mprefer-vector-width=512)
set(FLASHSDK_CPU_FLAGS_avx512_bf16 ${FLASHSDK_CPU_FLAGS_avx512} -mavx512bf16)
set(FLASHSDK_CPU_FLAGS_avx512_amx ${FLASHSDK_CPU_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
# Intrinsics that are text to the compiler: the assembler must know them too.
set(FLASHSDK_CPU_TRY_avx512_amx
  "#include <immintrin.h>\nint main() { _tile_zero(0); _tile_dpbf16ps(0, 1, 2); return 0; }")

# Slowest first. Lists given by the user are parts of these.
set(all_isas portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  list(APPEND all_isas avx2 avx512 avx512_bf16 avx512_amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  list(APPEND all_isas neon neon_bf16)
endif()

set(FLASHSDK_CPU_ISAS all CACHE STRING
  "Instruction sets of the CPU kernels: all, native (the fastest that this machine runs) or part of: ${all_isas}")
set(FLASHSDK_CPU_DTYPES "" CACHE STRING "Data types of the CPU kernels, part of: fp32 bf16 fp16; empty: all")
set(FLASHSDK_CPU_HEAD_DIMS "" CACHE STRING "Head dimensions of the CPU kernels, part of: 128 256 576; empty: all")

# The instruction sets asked for, less those that the compiler refuses.
function(flashsdk_select_isas result)
  set(asked ${FLASHSDK_CPU_ISAS})
  set(allowed all native ${all_isas})
  foreach(isa IN LISTS asked)
    if(NOT isa IN_LIST allowed)
      message(FATAL_ERROR "FLASHSDK_CPU_ISAS: ${isa}; allowed here are ${allowed}")
    endif()
  endforeach()
  if(NOT asked)
    message(FATAL_ERROR "FLASHSDK_CPU_ISAS: empty; allowed here are ${allowed}")
  endif()
  if("all" IN_LIST asked)
    set(asked ${all_isas})
  elseif("native" IN_LIST asked)
    if(CMAKE_CROSSCOMPILING)
      message(FATAL_ERROR "FLASHSDK_CPU_ISAS: native, when cross-compiling; allowed here are all ${all_isas}")
    endif()
    flashsdk_run_here(native native_isas)
    list(APPEND asked ${native})
  endif()
  set(usable "")
  foreach(isa IN LISTS all_isas)  # keeps their order
    if(isa IN_LIST asked)
      list(JOIN FLASHSDK_CPU_FLAGS_${isa} " " CMAKE_REQUIRED_FLAGS)
      set(source "int main() { return 0; }")
      if(DEFINED FLASHSDK_CPU_TRY_${isa})
        set(source "${FLASHSDK_CPU_TRY_${isa}}")
      endif()
      check_cxx_source_compiles("${source}" FLASHSDK_COMPILES_${isa})
      if(FLASHSDK_COMPILES_${isa})
        list(APPEND usable ${isa})
      else()
        message(NOTICE "CPU kernels: the compiler refuses ${FLASHSDK_CPU_FLAGS_${isa}}; leaving out ${isa}")
      endif()
    endif()
  endforeach()
  set(${result} "${usable}" PARENT_SCOPE)
endfunction()

# An object library of kernel code for one instruction set.
function(flashsdk_add_isa_objects target isa)
  # NaN and infinity must work, so not -ffast-math.
  set(optimise -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  if(FLASHSDK_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
    set(optimise -O1 -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND "neon" IN_LIST all_isas)
    # Before registers are given out, GCC moves all broadcasts of a micro-kernel's step ahead of its products: they do
    # not fit beside the accumulators, of which it then keeps some on the stack (GCC 12: 20 of 158 instructions).
    list(APPEND optimise -fno-schedule-insns)
  endif()
  add_library(${target} OBJECT ${ARGN})
  target_link_libraries(${target} PRIVATE flashsdk_kernels flashsdk_warnings)
  target_compile_options(${target} PRIVATE ${optimise} ${FLASHSDK_CPU_FLAGS_${isa}})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND isa MATCHES "avx512")
    # GCC 12 warns of uninitialised values inside its own intrinsics (GCC bug 105593).
    target_compile_options(${target} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
endfunction()

# Sets FLASHSDK_KERNEL_OBJECTS, FLASHSDK_KERNEL_TABLE (the source that lists all kernels) and FLASHSDK_CPU_BUILT_ISAS.
function(flashsdk_add_cpu_kernels)
  flashsdk_select_isas(isas)
  flashsdk_write_sources(cpu . isas FLASHSDK_CPU_DTYPES FLASHSDK_CPU_HEAD_DIMS)
  set(objects "")
  foreach(isa IN LISTS isas)
    if(SOURCES_${isa})  # not where it adds nothing for the dtypes asked for
      flashsdk_add_isa_objects(flashsdk_cpu_${isa} ${isa} ${SOURCES_${isa}})
      list(APPEND objects $<TARGET_OBJECTS:flashsdk_cpu_${isa}>)
    endif()
  endforeach()
  message(STATUS "CPU kernels: ${isas}")
  set(FLASHSDK_KERNEL_OBJECTS ${objects} PARENT_SCOPE)
  set(FLASHSDK_KERNEL_TABLE ${SOURCES_table} PARENT_SCOPE)
  set(FLASHSDK_CPU_BUILT_ISAS ${isas} PARENT_SCOPE)
endfunction()
