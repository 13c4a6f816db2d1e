# flashsdk_warnings: the warnings, and with FLASHSDK_SANITIZE the sanitizers, of every target of ours.
add_library(flashsdk_warnings INTERFACE)
target_compile_options(flashsdk_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-psabi>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${FLASHSDK_WERROR}>>:-Werror>)

set(FLASHSDK_SANITIZE_LINK "")
if(FLASHSDK_SANITIZE)
  string(REPLACE ";" "," sanitizers "${FLASHSDK_SANITIZE}")
  target_compile_options(flashsdk_warnings INTERFACE
    -fsanitize=${sanitizers} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  if(sanitizers MATCHES "address")
    # A null pointer and a place outside an object are AddressSanitizer's: to check them twice takes a sixth of the build.
    target_compile_options(flashsdk_warnings INTERFACE -fno-sanitize=null,object-size,vptr)
  endif()
  set(FLASHSDK_SANITIZE_LINK -fsanitize=${sanitizers})
endif()
