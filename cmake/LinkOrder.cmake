# Functions of like size side by side in a library. Kernels of two dtypes, masks or instruction sets are much the same
# code, and a wheel's compression only looks back 32 KiB: it is a quarter smaller for it.
include(CheckCXXSourceCompiles)

# For GNU's linker, and what takes its scripts, in Release builds, of which wheels are. With any other a library is as
# its objects come. Says which it is by
# FLASHSDK_LINKS_BY_SIZE.
function(flashsdk_link_by_size target objects)
  set(FLASHSDK_LINKS_BY_SIZE OFF PARENT_SCOPE)
  set(probe ${PROJECT_BINARY_DIR}/generated/link_order_probe.ld)
  file(WRITE ${probe} "SECTIONS { .text.by_size : { *(.text.none) } } INSERT AFTER .text;\n")
  set(CMAKE_REQUIRED_LINK_OPTIONS LINKER:-T,${probe})
  check_cxx_source_compiles("int main() { return 0; }" FLASHSDK_TAKES_LINKER_SCRIPT)
  if(NOT FLASHSDK_TAKES_LINKER_SCRIPT OR NOT CMAKE_NM OR NOT CMAKE_BUILD_TYPE STREQUAL "Release")
    return()
  endif()
  set(script ${PROJECT_BINARY_DIR}/generated/${target}_order.ld)
  set(program ${PROJECT_SOURCE_DIR}/cmake/write_link_order.cmake)
  add_custom_command(OUTPUT ${script}
    COMMAND ${CMAKE_COMMAND} -P ${program} -- ${CMAKE_NM} ${script} ${objects}
    DEPENDS ${program} ${objects} COMMENT "Order of functions" COMMAND_EXPAND_LISTS VERBATIM)
  target_sources(${target} PRIVATE ${script})
  target_link_options(${target} PRIVATE LINKER:-T,${script})
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${script})
  set(FLASHSDK_LINKS_BY_SIZE ON PARENT_SCOPE)
endfunction()
