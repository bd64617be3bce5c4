# One kernel source, compiled once for each instruction set and element type, each time with that instruction set's
# flags; dispatch.c picks one at run time. Nothing else in the library is compiled with these flags, so the rest runs
# on every CPU of the architecture.
set(RAPT_ISAS baseline)
if(CMAKE_SIZEOF_VOID_P EQUAL 8 AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
  list(APPEND RAPT_ISAS avx2 avx512)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  list(APPEND RAPT_ISAS neon) # always there: no flags
endif()

set(RAPT_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(RAPT_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)

# Compiles `source` for each instruction set and each of the types after `objects`, which gets the object files.
function(rapt_compile_for_isas name source objects)
  set(all)
  foreach(isa IN LISTS RAPT_ISAS)
    foreach(type IN LISTS ARGN)
      set(target ${name}_${isa}_${type})
      string(TOUPPER "RAPT_KERNEL_ISA_${isa};RAPT_KERNEL_${type}" definitions)
      add_library(${target} OBJECT ${source})
      rapt_compile_options(${target})
      target_include_directories(${target} PRIVATE include src)
      target_compile_definitions(${target} PRIVATE ${definitions})
      target_compile_options(${target} PRIVATE ${RAPT_FLAGS_${isa}})
      if(RAPT_BUILD_FUZZERS) # the fuzzers are after what reads files; clang takes minutes for these checks, and asan has them
        target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
      endif()
      list(APPEND all $<TARGET_OBJECTS:${target}>)
    endforeach()
  endforeach()
  set(${objects} ${all} PARENT_SCOPE)
endfunction()

rapt_compile_for_isas(rapt_kernels src/cpu/kernels/kernels.c RAPT_KERNEL_OBJECTS f32 f64)
