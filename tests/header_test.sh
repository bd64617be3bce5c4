#!/bin/sh
# Each public header must compile alone, in every language that may include it, without a single warning.
# usage: header_test.sh INCLUDE_DIR
set -eu
include=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
warnings="-Wall -Wextra -Wshadow -Wconversion -Wpedantic -Werror"
tried=0

# Compiled through a file that includes it: as the main file a header draws warnings that no user ever sees.
check() { # compiler, suffix, standard
    command -v "$1" >/dev/null || return 0
    for header in "$include"/rapt/*.h; do
        printf '#include <rapt/%s>\n#include <rapt/%s>\nint main(void) { return 0; }\n' \
            "${header##*/}" "${header##*/}" >"$work/main.$2"
        if grep -q '<dlpack/' "$header" && ! echo '#include <dlpack/dlpack.h>' | "$1" -E -x c - >/dev/null 2>&1; then
            echo "skipped without dlpack/dlpack.h: ${header##*/}"
            continue
        fi
        echo "$1 -std=$3 ${header##*/}"
        # shellcheck disable=SC2086 # a list of flags
        "$1" "-std=$3" $warnings -I "$include" -fsyntax-only "$work/main.$2"
        tried=1
    done
}

for compiler in gcc clang; do
    check $compiler c c11
    check $compiler c c17
done
for compiler in g++ clang++; do
    check $compiler cpp c++17
done
[ $tried = 1 ] || { echo "neither gcc nor clang found"; exit 1; }
