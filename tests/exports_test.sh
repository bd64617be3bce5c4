#!/bin/sh
# The shared library must export exactly the names in exports.txt: those that rapt.h declares with RAPT_API.
# After adding a call to the header, add its name to the list: it is then a promise.
# usage: exports_test.sh LIBRARY LIST
set -eu
actual=$(mktemp)
trap 'rm -f "$actual"' EXIT
nm -D --defined-only "$1" | awk '{print $3}' | LC_ALL=C sort >"$actual"
diff -u "$2" "$actual" && echo "$(wc -l <"$2") names, as listed"
