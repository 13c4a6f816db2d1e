# Source files of the kernels, written at configure time from the tables in cpp/kernels/table by a program that the
# machine which builds can run. A row more or less there configures again.
set(kernel_tables ${PROJECT_SOURCE_DIR}/cpp/kernels/table)
set(FLASHSDK_BUILD_CXX c++ CACHE STRING "Cross-compiling: a C++20 compiler for the machine that builds")
mark_as_advanced(FLASHSDK_BUILD_CXX)
file(GLOB table_files CONFIGURE_DEPENDS ${kernel_tables}/*)
# … and what the programs there include.
foreach(file kernels/common/features.h kernels/common/kernel_entry.h kernels/common/params.h
             kernels/common/tile_walk.h kernels/sm90/forward/tiles.h src/cpu_features.cpp)
  list(APPEND table_files ${PROJECT_SOURCE_DIR}/cpp/${file})
endforeach()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${table_files})

# Compiles and runs one source file of the tables' here; what it prints is the result. A failure is fatal, with its text.
function(flashsdk_run_here result source)
  set(compiler ${FLASHSDK_BUILD_CXX})
  if(NOT CMAKE_CROSSCOMPILING)
    separate_arguments(flags UNIX_COMMAND "${CMAKE_CXX_COMPILER_ARG1} ${CMAKE_CXX_FLAGS}")
    set(compiler ${CMAKE_CXX_COMPILER} ${flags})
  endif()
  set(program ${PROJECT_BINARY_DIR}/generated/${source})
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/generated)
  execute_process(
    COMMAND ${compiler} -std=c++20 -I${PROJECT_SOURCE_DIR}/cpp/include -I${PROJECT_SOURCE_DIR}/cpp/kernels
            -I${PROJECT_SOURCE_DIR}/cpp/src ${kernel_tables}/${source}.cpp -o ${program}
    RESULT_VARIABLE failed ERROR_VARIABLE text)
  if(failed AND CMAKE_CROSSCOMPILING)
    string(APPEND text "FLASHSDK_BUILD_CXX: ${compiler}; a C++20 compiler for the machine that builds")
  endif()
  if(NOT failed)
    execute_process(COMMAND ${program} ${ARGN} RESULT_VARIABLE failed OUTPUT_VARIABLE printed ERROR_VARIABLE text)
  endif()
  if(failed)
    string(STRIP "${text}" text)
    if(NOT text)
      list(JOIN compiler " " text)
      string(PREPEND text "${source}.cpp, compiled by ")
      string(APPEND text ", does not run here: ${failed}")
    endif()
    message(FATAL_ERROR "${text}")
  endif()
  set(${result} "${printed}" PARENT_SCOPE)
endfunction()

# Writes the files of one table into build/generated/FOLDER, by what the variables say that are named behind. Sets, for
# each target that the program names, SOURCES_<target>.
function(flashsdk_write_sources table folder)
  set(directory ${PROJECT_BINARY_DIR}/generated/${folder})
  set(arguments "")
  foreach(variable IN LISTS ARGN)
    list(JOIN ${variable} "," text)
    list(APPEND arguments ${variable}=${text})
  endforeach()
  flashsdk_run_here(printed write_sources ${table} ${directory} ${arguments})
  string(REGEX MATCHALL "[^\n]+" lines "${printed}")
  foreach(line IN LISTS lines)
    string(REPLACE " " ";" words ${line})
    list(GET words 0 target)
    list(GET words 1 file)
    list(APPEND SOURCES_${target} ${directory}/${file})
    set(SOURCES_${target} ${SOURCES_${target}} PARENT_SCOPE)
  endforeach()
endfunction()
