# Ranges that profilers show (cpp/src/profiler_range.h). NVTX is headers alone, which CUDA's toolkit has; a build without
# them has no ranges. An empty FLASHSDK_NVTX_INCLUDE_DIR leaves them out.
if(NOT DEFINED FLASHSDK_NVTX_INCLUDE_DIR)
  find_package(CUDAToolkit QUIET)
  find_path(FLASHSDK_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(NOT FLASHSDK_NVTX_INCLUDE_DIR)
    set(FLASHSDK_NVTX_INCLUDE_DIR "")
  endif()
elseif(FLASHSDK_NVTX_INCLUDE_DIR AND NOT EXISTS ${FLASHSDK_NVTX_INCLUDE_DIR}/nvtx3/nvToolsExt.h)
  message(FATAL_ERROR "FLASHSDK_NVTX_INCLUDE_DIR: ${FLASHSDK_NVTX_INCLUDE_DIR}; no nvtx3/nvToolsExt.h in it")
endif()
