#!/bin/bash
# clang-tidy over the project's own files, then cppcheck, both with the flags of the clang build.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$(nproc 2>/dev/null || echo 2)
build=build/lint # of its own: nothing in it needs to be built

cmake --preset clang -B $build -DRAPT_BUILD_TESTS=OFF -DRAPT_BUILD_PYTHON=ON -DRAPT_INSTALL=OFF >/dev/null
# Every file that is built, once (kernels.c is listed for each instruction set), but for the tests: neither tool knows that
# a failed assertion of cmocka's ends the test, and both see bugs behind each.
sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' $build/compile_commands.json | sort -u |
    xargs -n 1 -P "$jobs" clang-tidy --quiet -p $build 2> >(grep -vE '^[0-9]+ warnings? generated' >&2 || true)
cppcheck --quiet -j "$jobs" --project=$build/compile_commands.json --enable=warning,performance,portability \
    --inline-suppr --error-exitcode=1
