# What every file of the project is compiled with.
#
# -ffp-contract=off: a fused multiply-add is written out where one is meant; the compiler's own choice would change bits
# with the flags. -fno-math-errno only frees sqrt and fma to become instructions. Never -ffast-math: it breaks
# infinities and NaN. -fno-semantic-interposition: gcc may inline exported functions of ours, too (clang does anyway).
# CMake itself adds -O3 to a Release build.
function(rapt_compile_options target)
  set_target_properties(${target} PROPERTIES
    C_STANDARD 17
    C_STANDARD_REQUIRED ON
    C_EXTENSIONS OFF
    C_VISIBILITY_PRESET hidden
    POSITION_INDEPENDENT_CODE ON)
  target_compile_options(${target} PRIVATE -ffp-contract=off -fno-math-errno -fno-semantic-interposition
                                           -Wall -Wextra -Wshadow -Wconversion)
  if(RAPT_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(RAPT_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${RAPT_SANITIZE} -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer)
    if(CMAKE_C_COMPILER_ID STREQUAL GNU) # instrumented code draws false ones; the release build gives the true ones
      target_compile_options(${target} PRIVATE -Wno-maybe-uninitialized)
    endif()
  endif()
endfunction()
