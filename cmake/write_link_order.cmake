# cmake -P write_link_order.cmake -- NM SCRIPT OBJECT...
# Writes a linker's script: by size, the functions that have a section of their own in these objects.
math(EXPR last "${CMAKE_ARGC} - 1")
set(arguments "")
foreach(i RANGE ${last})
  list(APPEND arguments "${CMAKE_ARGV${i}}")
endforeach()
list(FIND arguments -- end)
math(EXPR end "${end} + 1")
list(SUBLIST arguments ${end} -1 arguments)
list(POP_FRONT arguments nm script)

execute_process(COMMAND ${nm} --defined-only --print-size ${arguments}
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
# Address, size in hexadecimal digits, always as many, kind, name.
string(REGEX MATCHALL "[0-9a-f]+ [tTwW] [^\n]+" functions "${symbols}")
list(REMOVE_DUPLICATES functions)
list(SORT functions)
list(TRANSFORM functions REPLACE "^[0-9a-f]+ . (.*)$" "    *(.text.\\1)\n")
list(REMOVE_DUPLICATES functions)
list(JOIN functions "" functions)
file(WRITE ${script} "SECTIONS {\n  .text.by_size : {\n${functions}  }\n}\nINSERT AFTER .text;\n")
