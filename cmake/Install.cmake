# For programs in C++ and C: find_package(flashsdk CONFIG REQUIRED), then flashsdk::flashsdk, or pkg-config flashsdk.
# `cmake --install` and wheels have the same files, all of which find each other wherever the folder goes.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashsdk)
set(namelink "")
if(SKBUILD)
  set(namelink NAMELINK_SKIP)
endif()

install(TARGETS flashsdk flashsdk_kernels EXPORT flashsdkTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development ${namelink}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT flashsdkTargets NAMESPACE flashsdk:: DESTINATION ${package_dir} COMPONENT development)

install(DIRECTORY cpp/include/flashsdk ${PROJECT_BINARY_DIR}/generated/include/flashsdk
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.h")
# The kernels' headers, for mask policies of a user's own: flashsdk::kernels.
install(DIRECTORY cpp/kernels/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flashsdk/kernels
  COMPONENT development FILES_MATCHING PATTERN "*.h")

if(NOT SKBUILD)
  install(FILES docs/semantics.md docs/numerics.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)
endif()

configure_package_config_file(cmake/flashsdkConfig.cmake.in ${PROJECT_BINARY_DIR}/flashsdkConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashsdkConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashsdkConfig.cmake ${PROJECT_BINARY_DIR}/flashsdkConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT development)

# The same for pkg-config, by its own place. A wheel's folder is on no search path, and its library has no short name.
cmake_path(ABSOLUTE_PATH CMAKE_INSTALL_LIBDIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE libdir)
cmake_path(ABSOLUTE_PATH CMAKE_INSTALL_INCLUDEDIR BASE_DIRECTORY ${CMAKE_INSTALL_PREFIX} OUTPUT_VARIABLE includedir)
file(RELATIVE_PATH pc_includedir ${libdir}/pkgconfig ${includedir})
set(pc_libs "-L\${libdir} -lflashsdk")
if(NOT BUILD_SHARED_LIBS)
  string(APPEND pc_libs " -pthread -ldl -lstdc++ -lm")
elseif(SKBUILD)
  set(pc_libs "-L\${libdir} -Wl,-rpath,\${libdir} -l:libflashsdk.so.${FLASHSDK_SOVERSION}")
endif()
configure_file(cmake/flashsdk.pc.in ${PROJECT_BINARY_DIR}/flashsdk.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashsdk.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
