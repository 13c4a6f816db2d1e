# CPU kernels: one source, compiled for several instruction sets and chosen at run time.
#
# flashsdk_add_cpu_kernels() writes build/generated/cpu_<isa>_<dtype>_<op>.cpp from the table in
# cpp/kernels/instantiate/cpu_table.cmake and compiles them, one object library per instruction set.
include(CheckCXXSourceCompiles)

set(FLASHSDK_CPU_FLAGS_portable "")
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
endif()
include(${PROJECT_SOURCE_DIR}/cpp/kernels/instantiate/cpu_table.cmake)

set(FLASHSDK_CPU_ISAS all CACHE STRING
  "Instruction sets of the CPU kernels: all, native (the fastest that this machine runs) or part of: ${all_isas}")
set(FLASHSDK_CPU_DTYPES "${FLASHSDK_CPU_ALL_DTYPES}" CACHE STRING
  "Data types of the CPU kernels, part of: ${FLASHSDK_CPU_ALL_DTYPES}")
set(FLASHSDK_CPU_HEAD_DIMS "${FLASHSDK_CPU_ALL_HEAD_DIMS}" CACHE STRING
  "Head dimensions of the CPU kernels, part of: ${FLASHSDK_CPU_ALL_HEAD_DIMS}")

# Dropped sets are named, a misspelt one is an error.
function(flashsdk_check_list name allowed)
  foreach(item IN LISTS ${name})
    if(NOT item IN_LIST allowed)
      message(FATAL_ERROR "${name}: ${item}; allowed here are ${allowed}")
    endif()
  endforeach()
  if(NOT ${name})
    message(FATAL_ERROR "${name}: empty; allowed here are ${allowed}")
  endif()
endfunction()
flashsdk_check_list(FLASHSDK_CPU_ISAS "all;native;${all_isas}")
flashsdk_check_list(FLASHSDK_CPU_DTYPES "${FLASHSDK_CPU_ALL_DTYPES}")
flashsdk_check_list(FLASHSDK_CPU_HEAD_DIMS "${FLASHSDK_CPU_ALL_HEAD_DIMS}")

# The instruction sets asked for, less those that the compiler refuses.
function(flashsdk_select_isas result)
  set(asked ${FLASHSDK_CPU_ISAS})
  if("all" IN_LIST asked)
    set(asked ${all_isas})
  elseif("native" IN_LIST asked)
    flashsdk_native_isas(native)
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

# What this machine needs: its fastest instruction set, by the library's own detection, and where that one has kernels
# for some dtypes only, the next slower.
function(flashsdk_native_isas result)
  try_run(exit_code compiled ${PROJECT_BINARY_DIR}/native_isas ${PROJECT_SOURCE_DIR}/cmake/native_isas.cpp
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${PROJECT_SOURCE_DIR}/cpp/src RUN_OUTPUT_VARIABLE fastest_first)
  if(NOT compiled OR NOT exit_code EQUAL 0)
    message(FATAL_ERROR "FLASHSDK_CPU_ISAS: native; this machine does not run what it compiles: name the sets")
  endif()
  set(needed "")
  foreach(isa IN LISTS fastest_first)
    list(APPEND needed ${isa})
    if(NOT DEFINED FLASHSDK_CPU_ONLY_DTYPES_${isa})
      break()
    endif()
  endforeach()
  set(${result} "${needed}" PARENT_SCOPE)
endfunction()

# Writes a file only when its contents change, so that configuring again recompiles nothing.
function(flashsdk_generate template output)
  configure_file(${PROJECT_SOURCE_DIR}/cpp/kernels/instantiate/${template} ${PROJECT_BINARY_DIR}/generated/${output} @ONLY)
endfunction()

# An object library of kernel code for one instruction set.
function(flashsdk_add_isa_objects target isa)
  # NaN and infinity must work, so not -ffast-math.
  set(optimise -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  if(FLASHSDK_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
    set(optimise -O1 -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  endif()
  add_library(${target} OBJECT ${ARGN})
  target_link_libraries(${target} PRIVATE flashsdk_kernels flashsdk_warnings)
  target_compile_options(${target} PRIVATE ${optimise} ${FLASHSDK_CPU_FLAGS_${isa}})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND isa MATCHES "avx512")
    # GCC 12 warns of uninitialised values inside its own intrinsics (GCC bug 105593).
    target_compile_options(${target} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
endfunction()

# The lines of one generated file: smallest head dimension first, and without score features before with them.
function(flashsdk_cpu_entries op type)
  set(entries "")
  set(count 0)
  foreach(head_dim IN LISTS FLASHSDK_CPU_HEAD_DIMS)
    foreach(policy IN LISTS FLASHSDK_CPU_POLICIES)
      foreach(features false true)
        string(APPEND entries "    ${op}_entry<${type}, ${head_dim}, ${policy}, ${features}>(),\n")
        math(EXPR count "${count} + 1")
      endforeach()
    endforeach()
  endforeach()
  set(ENTRIES "${entries}" PARENT_SCOPE)
  set(COUNT ${count} PARENT_SCOPE)
endfunction()

function(flashsdk_add_cpu_kernels)
  flashsdk_select_isas(isas)

  set(objects "")
  set(DECLARATIONS "")
  set(CALLS "")
  list(REVERSE isas)  # the fastest is first in the table
  foreach(ISA IN LISTS isas)
    set(sources "")
    foreach(DTYPE IN LISTS FLASHSDK_CPU_DTYPES)
      if(DEFINED FLASHSDK_CPU_ONLY_DTYPES_${ISA} AND NOT DTYPE IN_LIST FLASHSDK_CPU_ONLY_DTYPES_${ISA})
        continue()
      endif()
      foreach(OP IN LISTS FLASHSDK_CPU_OPS)
        set(NAME cpu_${ISA}_${DTYPE}_${OP})
        flashsdk_cpu_entries(${OP} ${FLASHSDK_CPU_TYPE_${DTYPE}})  # ENTRIES, COUNT
        flashsdk_generate(cpu.cpp.in ${NAME}.cpp)
        list(APPEND sources ${PROJECT_BINARY_DIR}/generated/${NAME}.cpp)
        string(APPEND DECLARATIONS "extern const KernelEntry ${NAME}[${COUNT}];\n")
        string(APPEND CALLS "  for (const KernelEntry& entry : ${NAME}) table.add(entry);\n")
      endforeach()
    endforeach()
    if(NOT sources)
      continue()
    endif()
    flashsdk_add_isa_objects(flashsdk_cpu_${ISA} ${ISA} ${sources})
    list(APPEND objects $<TARGET_OBJECTS:flashsdk_cpu_${ISA}>)
  endforeach()
  flashsdk_generate(kernel_table.cpp.in kernel_table.cpp)

  list(REVERSE isas)
  message(STATUS "CPU kernels: ${isas}; ${FLASHSDK_CPU_DTYPES}; head_dim ${FLASHSDK_CPU_HEAD_DIMS}")
  set(FLASHSDK_KERNEL_OBJECTS ${objects} PARENT_SCOPE)
  set(FLASHSDK_CPU_BUILT_ISAS ${isas} PARENT_SCOPE)
endfunction()
