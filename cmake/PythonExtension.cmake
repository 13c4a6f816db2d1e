# flashsdk._bindings, by nanobind. From Python 3.12 on, pip's build makes it for the stable ABI.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module OPTIONAL_COMPONENTS ${SKBUILD_SABI_COMPONENT})
execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_ROOT RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "nanobind is missing in ${Python_EXECUTABLE}; install it: ${Python_EXECUTABLE} -m pip install nanobind")
endif()
find_package(nanobind CONFIG REQUIRED)

# FREE_THREADED: a Python without a GIL leaves it off, as nothing here needs it (CONTRIBUTING.md says what that asks).
nanobind_add_module(_bindings STABLE_ABI FREE_THREADED NB_STATIC NOMINSIZE
  python/flashsdk/_bindings.cpp python/flashsdk/_arrays.cpp)
# A wheel has the library once, for Python and for programs. A development build's extension has it inside: alone in its
# file it can be copied, and two builds of it do not mix in one process.
set(core flashsdk_archive)
if(SKBUILD AND BUILD_SHARED_LIBS)
  set(core flashsdk)
  set_target_properties(_bindings PROPERTIES INSTALL_RPATH $ORIGIN/lib)
endif()
target_link_libraries(_bindings PRIVATE ${core} flashsdk_kernels flashsdk_warnings)
target_include_directories(_bindings PRIVATE ${PROJECT_SOURCE_DIR}/cpp/src ${PROJECT_SOURCE_DIR}/cpp/python)
# Only the module's init function is visible.
target_link_options(_bindings PRIVATE LINKER:--exclude-libs,ALL)

if(SKBUILD)
  install(TARGETS _bindings LIBRARY DESTINATION flashsdk COMPONENT python EXCLUDE_FROM_ALL)
  # nanobind is linked into it, and its licence wants to be shown.
  file(GLOB nanobind_licence ${nanobind_ROOT}/../../nanobind-*.dist-info/licenses/LICENSE)
  install(FILES ${nanobind_licence} DESTINATION flashsdk/licenses RENAME nanobind.txt COMPONENT python EXCLUDE_FROM_ALL)
else()
  # A development build: the extension lies beside its Python files, unless it is only to be looked at.
  set(FLASHSDK_EXTENSION_DIR ${PROJECT_SOURCE_DIR}/python/flashsdk CACHE PATH "Where a development build puts the extension")
  set_target_properties(_bindings PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${FLASHSDK_EXTENSION_DIR})
endif()
