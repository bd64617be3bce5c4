#!/bin/sh
# Installs what building (or testing) needs and this machine lacks, and nothing else; silent when all is there.
# usage: bootstrap.sh build|test|python
# shellcheck disable=SC2086 # lists of words are split on purpose
set -eu
cd "$(dirname "$0")/.."
PATH=$PWD/.tools/bin:$PATH
case ${1:-build} in
test) tools="cc cmake ninja c++ pkg-config cmocka dlpack" ;;
python) tools="cc cmake ninja python3 venv python-headers" ;;
*) tools="cc cmake ninja" ;;
esac

scratch=$(mktemp)
trap 'rm -f "$scratch"' EXIT

has() { command -v "$1" >/dev/null 2>&1; }
compiles() { # source, flags: a library is there if a program with it compiles and links
    printf '%s\nint main(void) { return 0; }\n' "$1" | "${CC:-cc}" -x c - $2 -o "$scratch" >/dev/null 2>&1
}
has_cmake() { # 3.20 or newer, for CMakePresets.json
    has cmake && cmake --version | awk 'NR == 1 { split($3, v, "."); exit !(v[1] > 3 || (v[1] == 3 && v[2] >= 20)) }'
}
headers='import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))'
missing() { # prints those of the given tools that are not there
    for tool in "$@"; do
        case $tool in
        cc) has "${CC:-cc}" ;;
        c++) has "${CXX:-c++}" ;;
        cmake) has_cmake ;;
        cmocka) compiles "" -lcmocka ;;
        dlpack) compiles "#include <dlpack/dlpack.h>" "" ;;
        venv) python3 -c "import venv, ensurepip" >/dev/null 2>&1 ;;
        python-headers) python3 -c "$headers" >/dev/null 2>&1 ;;
        *) has "$tool" ;;
        esac || echo "$tool"
    done
}
needed=$(missing $tools)
[ -n "$needed" ] || exit 0

# What each package manager calls a tool; a dash where it has none.
package() { # manager, tool
    awk -v manager="$1" -v tool="$2" '
        NR == 1 { for (i = 1; i <= NF; i++) if ($i == manager) column = i }
        $1 == tool && $column != "-" { gsub(",", " ", $column); print $column }' <<'EOF'
tool            apt-get        dnf                 apk           pacman   brew
cc              gcc,libc6-dev  gcc                 gcc,musl-dev  gcc      -
c++             g++            gcc-c++             g++           gcc      -
cmake           cmake          cmake               cmake         cmake    cmake
ninja           ninja-build    ninja-build         ninja         ninja    ninja
pkg-config      pkg-config     pkgconf-pkg-config  pkgconf       pkgconf  pkgconf
cmocka          libcmocka-dev  libcmocka-devel     cmocka-dev    cmocka   cmocka
dlpack          libdlpack-dev  -                   -             -        -
python3         python3        python3             python3       python   python
venv            python3-venv   python3             python3       python   python
python-headers  python3-dev    python3-devel       python3-dev   python   python
EOF
}

# As root, or as one who may become root without being asked for a password.
root=none
if [ "$(id -u)" = 0 ]; then
    root=
elif has sudo && sudo -n true 2>/dev/null; then
    root="sudo -n"
fi
install() { # manager, packages
    case $1 in
    apt-get) $root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $2 ;;
    dnf) $root dnf install -y $2 ;;
    apk) $root apk add $2 ;;
    pacman) $root pacman -S --noconfirm --needed $2 ;;
    brew) brew install $2 ;; # refuses to be run as root
    esac
}
for manager in apt-get dnf apk pacman brew; do
    if ! has $manager || { [ "$root" = none ] && [ $manager != brew ]; }; then continue; fi
    echo "installing with $manager:" $needed
    # A machine that never fetched its lists of packages knows none.
    case $manager in
    apt-get) $root apt-get update >"$scratch" 2>&1 || tail -n 3 "$scratch" ;;
    pacman) $root pacman -Sy >"$scratch" 2>&1 || tail -n 3 "$scratch" ;;
    esac
    for tool in $needed; do # one by one: a package that a system lacks must not keep the others out
        packages=$(package $manager "$tool")
        [ -z "$packages" ] || install $manager "$packages" >"$scratch" 2>&1 || tail -n 3 "$scratch"
    done
    break
done

# cmake and ninja also come as Python packages, into this folder alone.
needed=$(missing cmake ninja)
if [ -n "$needed" ] && has python3; then
    echo "installing from PyPI into .tools:" $needed
    { python3 -m venv .tools && .tools/bin/python -m pip install $needed; } >"$scratch" 2>&1 || tail -n 3 "$scratch"
fi

needed=$(missing $tools | grep -v dlpack || true) # one test alone wants dlpack, and is left out without it
[ -z "$needed" ] || { echo "please install:" $needed "(cmake 3.20 or newer)" >&2; exit 1; }
