#!/bin/bash
# Installs Rapt into a fresh folder, moves that folder (the package must not care), and builds and runs the README's
# program from it in every way that the README promises, a C++ program beside it, and the tool.
# usage: install_test.sh SOURCE_DIR BUILD_DIR     (CMAKE, CC and CXX from the environment)
set -euo pipefail
source=$1
build=$2
cmake=${CMAKE:-cmake}
cc=${CC:-cc}
cxx=${CXX:-c++}
strict="-Wall -Wextra -Wshadow -Wconversion -Wpedantic -Werror"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

command -v pkg-config >/dev/null || { echo "skipped: no pkg-config"; exit 77; }
DESTDIR='' "$cmake" --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
prefix=$work/prefix

# The first C block of the README that is a whole program; before there is one, the program in the header's comment.
if [ -f "$source/README.md" ]; then
    awk '/^```c$/ { inside = 1; text = ""; next }
         /^```/ && inside { inside = 0; if (text ~ /int main/) { printf "%s", text; exit } }
         inside { text = text $0 "\n" }' "$source/README.md" >"$work/main.c"
fi
if [ ! -s "$work/main.c" ]; then
    sed -n '/^ \*     #include <rapt\/rapt.h>/,/^ \*     }$/s/^ \*     \?//p' "$source/include/rapt/rapt.h" |
        sed 's/^    //' >"$work/main.c"
fi
grep -q 'int main' "$work/main.c" || { echo "no program found in README.md or rapt.h"; exit 1; }
cp "$source/tests/cxx_consumer.cpp" "$work/"

run() { # what it is, program
    echo "-- $1"
    LD_LIBRARY_PATH=$libdir "$2"
}

pc=$(find "$prefix" -name rapt.pc)
PKG_CONFIG_PATH=$(dirname "$pc")
export PKG_CONFIG_PATH
libdir=$(pkg-config --variable=libdir rapt)
cflags=$(pkg-config --cflags rapt)
shared=$(pkg-config --libs rapt)
static=$(pkg-config --static --libs rapt)
static=${static/-lrapt/-l:librapt.a} # the linker would take librapt.so, which lies in the same folder

cd "$work"
# shellcheck disable=SC2086 # lists of flags
{
    "$cc" $strict main.c $cflags $shared -o pc_shared
    run "pkg-config, shared" ./pc_shared
    "$cc" $strict main.c $cflags $static -o pc_static
    run "pkg-config, static" ./pc_static
    # the static program must stand without the shared library
    (libdir=/nonexistent && run "pkg-config, static, alone" ./pc_static)
    if command -v "$cxx" >/dev/null; then
        "$cxx" -std=c++17 $strict cxx_consumer.cpp $cflags $shared -o pc_cxx
        run "pkg-config, C++" ./pc_cxx
    fi
}

version=$(pkg-config --modversion rapt)
mkdir project
cat >project/CMakeLists.txt <<EOF
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES C)
find_package(rapt ${version%.*} REQUIRED)
add_executable(cmake_shared ../main.c)
target_link_libraries(cmake_shared PRIVATE rapt::rapt)
add_executable(cmake_static ../main.c)
target_link_libraries(cmake_static PRIVATE rapt::rapt_static)
EOF
{
    "$cmake" -S project -B project/build -DCMAKE_C_COMPILER="$cc" -DCMAKE_PREFIX_PATH="$prefix"
    "$cmake" --build project/build
} >log 2>&1 || { cat log; exit 1; }
run "find_package, shared" project/build/cmake_shared
run "find_package, static" project/build/cmake_static

if [ -x "$prefix/bin/rapt" ]; then
    echo "-- the tool, which finds its library alone"
    "$prefix/bin/rapt" --version | grep -qx "rapt $version"
    for file in man/man1/rapt.1 bash-completion/completions/rapt zsh/site-functions/_rapt fish/vendor_completions.d/rapt.fish; do
        [ -f "$prefix/share/$file" ] || { echo "not installed: $file"; exit 1; }
    done
fi
