# The C++ package: find_package(flashsdk CONFIG REQUIRED), then flashsdk::flashsdk.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashsdk)

install(TARGETS flashsdk flashsdk_kernels EXPORT flashsdkTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT flashsdkTargets NAMESPACE flashsdk:: DESTINATION ${package_dir} COMPONENT development)

install(DIRECTORY cpp/include/flashsdk ${PROJECT_BINARY_DIR}/generated/include/flashsdk
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development FILES_MATCHING PATTERN "*.h")
# The kernels' headers, for mask policies of a user's own: flashsdk::kernels.
install(DIRECTORY cpp/kernels/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/flashsdk/kernels
  COMPONENT development FILES_MATCHING PATTERN "*.h")

install(FILES docs/semantics.md docs/numerics.md LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)

configure_package_config_file(cmake/flashsdkConfig.cmake.in ${PROJECT_BINARY_DIR}/flashsdkConfig.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashsdkConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashsdkConfig.cmake ${PROJECT_BINARY_DIR}/flashsdkConfigVersion.cmake
  DESTINATION ${package_dir} COMPONENT development)
