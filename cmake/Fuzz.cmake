# Every tests/fuzz/fuzz_*.c is a libFuzzer program, for clang. It needs the library to be built with
# RAPT_SANITIZE=fuzzer-no-link,address,undefined, as the preset `fuzz` does.
file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/fuzz/fuzz_*.c)
foreach(source IN LISTS sources)
  get_filename_component(program ${source} NAME_WE)
  add_executable(${program} ${source})
  rapt_compile_options(${program})
  target_include_directories(${program} PRIVATE src)
  target_link_libraries(${program} PRIVATE rapt_static m Threads::Threads)
  target_link_options(${program} PRIVATE -fsanitize=fuzzer)
endforeach()
