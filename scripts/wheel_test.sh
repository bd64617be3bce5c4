#!/bin/sh
# Builds the wheel and tries it, beside NumPy alone, with every Python from 3.9 on that is found: on the PATH as python3
# and python3.N, and among pyenv's. One is enough; which were tried is said. Options are pip's, for the build.
# usage: wheel_test.sh [pip option...]
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/wheel-test
rm -rf "$work"
mkdir -p "$work"

pip() { # virtual environment, arguments
    environment=$1
    shift
    "$work/$environment/bin/python" -m pip --disable-pip-version-check "$@" --quiet
}

python3 -m venv "$work/build"
pip build wheel "$@" --no-deps --wheel-dir "$work" .
wheel=$(echo "$work"/*.whl)
case $wheel in
*-cp39-abi3-linux_*.whl | *-cp39-abi3-macosx_*.whl) echo "built ${wheel##*/}" ;;
*) echo "expected one wheel for all Pythons from 3.9 on (cp39-abi3), not ${wheel##*/}" >&2 && exit 1 ;;
esac

cat >"$work/check.py" <<'EOF'
import pathlib, subprocess, sys
import numpy as np
import rapt

assert pathlib.Path(rapt.__file__).is_relative_to(sys.prefix), rapt.__file__
assert rapt._core.__file__.endswith(".abi3.so"), rapt._core.__file__
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 4, 50, 16))
scores = np.exp(q @ k.swapaxes(-1, -2) / 4) * np.tri(50)
expected = scores / scores.sum(-1, keepdims=True) @ v
for dtype, bound in (("float64", 1e-13), ("float32", 1e-5)):
    out = rapt.scaled_dot_product_attention(*(x.astype(dtype) for x in (q, k, v)), is_causal=True)
    assert out.dtype == dtype and abs(out - expected).max() < bound
assert (rapt.scaled_dot_product_attention(memoryview(q), k, v) == rapt.scaled_dot_product_attention(q, k, v)).all()

layer = rapt.MultiheadAttention(16, 4, batch_first=True, dtype="float64")
x, state = q[:, 0], rapt.State()
out, _ = layer(x, x, x, state=state)
assert set(layer.backward(state, out)) == {"query", *layer.state_dict()}
rapt.save(layer, "layer.safetensors")
assert (rapt.load("layer.safetensors")(x, x, x)[0] == out).all()
for wrong in (lambda: layer(x[..., :3], x, x), lambda: rapt.load("check.py")):
    try:
        wrong()
    except ValueError:
        continue
    raise AssertionError("a mistake went through")
version = subprocess.run([sys.executable, "-m", "rapt", "--version"], stdout=subprocess.PIPE, check=True).stdout
assert rapt.__version__ in version.decode(), version
EOF

tried=''
left=''
for python in python3 python3.9 python3.10 python3.11 python3.12 python3.13 python3.14 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    # Names that lead nowhere (pyenv's of versions that are not chosen) and versions that are too old are passed over.
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 9))' \
        2>/dev/null) || continue
    case "$tried$left " in *" $version "*) continue ;; esac
    "$python" -m venv "$work/$version"
    # There may be no NumPy for it, if it is very new or old, and one that is compiled here takes minutes.
    if ! pip "$version" install --only-binary :all: numpy 2>"$work/pip.log"; then
        tail -n 1 "$work/pip.log" >&2
        left="$left $version"
        continue
    fi
    pip "$version" install --no-deps --no-index "$wheel"
    (cd "$work" && "$version/bin/python" check.py)
    tried="$tried $version"
done
[ -z "$left" ] || echo "could not install NumPy for Python:$left"
[ -n "$tried" ] || { echo "the wheel was not tried with any Python" >&2 && exit 1; }
echo "the wheel works with Python:$tried"
