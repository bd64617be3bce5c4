# Every tests/test_*.c is a cmocka program of its own, linked with the static library so that it can also reach what
# the shared one hides. A program that exits with 77 has been skipped, such as one for an instruction set that this
# CPU lacks.
set(label_kernels test_accuracy test_attention test_backward test_backward_facts test_cache test_cache_sequences test_dropout test_layer test_layer_calls test_layer_random test_layer_backward test_same_bits test_golden test_errors test_errors_objects) # repeated under each RAPT_ISA
set(label_threads test_threads test_same_bits test_backward test_optimizer) # what ThreadSanitizer runs

if(NOT TARGET rapt_static)
  message(FATAL_ERROR "The tests need the static library: set RAPT_BUILD_STATIC or unset RAPT_BUILD_TESTS")
endif()
find_path(CMOCKA_INCLUDE_DIR cmocka.h)
find_library(CMOCKA_LIBRARY cmocka)
find_path(DLPACK_INCLUDE_DIR dlpack/dlpack.h)
if(NOT CMOCKA_INCLUDE_DIR OR NOT CMOCKA_LIBRARY)
  message(FATAL_ERROR "The tests need cmocka: install it (libcmocka-dev) or unset RAPT_BUILD_TESTS")
endif()

add_library(rapt_test_support INTERFACE)
target_link_libraries(rapt_test_support INTERFACE rapt_static ${CMOCKA_LIBRARY} m Threads::Threads)
target_include_directories(rapt_test_support INTERFACE src tests)
target_include_directories(rapt_test_support SYSTEM INTERFACE ${CMOCKA_INCLUDE_DIR})
target_compile_definitions(rapt_test_support INTERFACE RAPT_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
if(CMAKE_CROSSCOMPILING_EMULATOR)
  target_compile_definitions(rapt_test_support INTERFACE RAPT_TEST_EMULATED)
endif()

# What the programs share: every other C file in tests/, but for what only those that run the tool need.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/test_*.c)
file(GLOB support CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/*.c)
set(tool_support ${PROJECT_SOURCE_DIR}/tests/cli_support.c)
list(REMOVE_ITEM support ${sources} ${tool_support})
if(support)
  add_library(rapt_support STATIC ${support})
  rapt_compile_options(rapt_support)
  set_target_properties(rapt_support PROPERTIES C_EXTENSIONS ON) # setenv, fork and the like
  target_link_libraries(rapt_support PRIVATE rapt_test_support)
  set(support rapt_support)
endif()

function(rapt_add_test name program isa)
  add_test(NAME ${name} COMMAND ${program} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 600)
  if(isa)
    set_tests_properties(${name} PROPERTIES ENVIRONMENT RAPT_ISA=${isa})
  endif()
  foreach(label kernels threads)
    if(program IN_LIST label_${label})
      set_property(TEST ${name} APPEND PROPERTY LABELS ${label})
    endif()
  endforeach()
endfunction()

foreach(source IN LISTS sources)
  get_filename_component(program ${source} NAME_WE)
  if(program STREQUAL test_dlpack AND NOT DLPACK_INCLUDE_DIR)
    message(STATUS "dlpack/dlpack.h not found: test_dlpack is left out")
    continue()
  endif()
  string(REGEX MATCH "^test_cli" runs_tool ${program})
  if(runs_tool AND NOT TARGET rapt_tool)
    continue()
  endif()
  add_executable(${program} ${source})
  rapt_compile_options(${program})
  set_target_properties(${program} PROPERTIES C_EXTENSIONS ON)
  target_link_libraries(${program} PRIVATE ${support} rapt_test_support)
  if(program STREQUAL test_dlpack)
    target_include_directories(${program} SYSTEM PRIVATE ${DLPACK_INCLUDE_DIR})
  endif()
  if(runs_tool) # and reads npy headers with the tool's own reader
    string(REPLACE ";" " " emulator "${CMAKE_CROSSCOMPILING_EMULATOR}")
    target_sources(${program} PRIVATE ${tool_support} tools/rapt/npy.c)
    target_include_directories(${program} PRIVATE tools/rapt)
    target_compile_definitions(${program} PRIVATE RAPT_TOOL="${emulator} $<TARGET_FILE:rapt_tool>")
    add_dependencies(${program} rapt_tool)
  endif()
  rapt_add_test(${program} ${program} "")
  if(program IN_LIST label_kernels)
    foreach(isa IN LISTS RAPT_ISAS)
      rapt_add_test(${program}.${isa} ${program} ${isa})
    endforeach()
  endif()
endforeach()

if(TARGET sentence)
  add_test(NAME example_sentence COMMAND sentence WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
endif()
if(TARGET reverse AND CMAKE_CROSSCOMPILING) # emulated, a few steps must do: with the loss that other machines have
  add_test(NAME example_reverse COMMAND reverse --steps 20 --save ${PROJECT_BINARY_DIR}/reverse.safetensors)
  set_tests_properties(example_reverse PROPERTIES PASS_REGULAR_EXPRESSION "test +loss 3[.]3215.*decoded from" TIMEOUT 600)
elseif(TARGET reverse) # long enough to learn it: the loss falls from 3.3, and what is decoded from the checkpoint is right
  add_test(NAME example_reverse
    COMMAND reverse --steps 250 --expect-loss 0.01 --save ${PROJECT_BINARY_DIR}/reverse.safetensors)
  set_tests_properties(example_reverse PROPERTIES TIMEOUT 600)
endif()

# The rest looks at what a user gets, which is neither instrumented nor for another architecture.
if(RAPT_SANITIZE OR CMAKE_CROSSCOMPILING)
  return()
endif()
add_test(NAME header_alone COMMAND ${PROJECT_SOURCE_DIR}/tests/header_test.sh ${PROJECT_SOURCE_DIR}/include)
add_test(NAME training_program
  COMMAND ${PROJECT_SOURCE_DIR}/tests/training_test.sh ${PROJECT_SOURCE_DIR}/include $<TARGET_FILE:rapt_static>)
set_tests_properties(training_program PROPERTIES ENVIRONMENT "CC=${CMAKE_C_COMPILER}")
if(TARGET rapt AND CMAKE_SYSTEM_NAME STREQUAL Linux)
  add_test(NAME exports
    COMMAND ${PROJECT_SOURCE_DIR}/tests/exports_test.sh $<TARGET_FILE:rapt> ${PROJECT_SOURCE_DIR}/tests/exports.txt)
endif()
if(TARGET rapt_tool)
  foreach(shell bash zsh fish)
    add_test(NAME completions_${shell} COMMAND ${PROJECT_SOURCE_DIR}/tests/completions_test.sh
      ${shell} $<TARGET_FILE:rapt_tool> ${PROJECT_SOURCE_DIR}/tools/rapt/completions)
    set_tests_properties(completions_${shell} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 60)
  endforeach()
endif()
if(TARGET rapt AND RAPT_INSTALL)
  add_test(NAME install
    COMMAND ${PROJECT_SOURCE_DIR}/tests/install_test.sh ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR})
  set_tests_properties(install PROPERTIES
    SKIP_RETURN_CODE 77 ENVIRONMENT "CMAKE=${CMAKE_COMMAND};CC=${CMAKE_C_COMPILER}")
endif()
