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
  set(FLASHSDK_SANITIZE_LINK -fsanitize=${sanitizers})
endif()
