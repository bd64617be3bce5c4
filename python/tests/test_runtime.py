"""Threads, processes, signals, the tool."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import rapt

X = np.random.default_rng(0).standard_normal((2, 4, 300, 32)).astype(np.float32)


def compute() -> np.ndarray:
    return rapt.scaled_dot_product_attention(X, X, X, is_causal=True)


@pytest.fixture(autouse=True)
def _two_threads():
    rapt.set_num_threads(2)
    yield
    rapt.set_num_threads(0)


def test_version() -> None:
    assert rapt.__version__.count(".") == 2


def test_number_of_threads_changes_no_bit() -> None:
    results = []
    for count in (1, 2, 3, 1):
        rapt.set_num_threads(count)
        assert rapt.get_num_threads() == count
        results.append(compute())
    assert all((result == results[0]).all() for result in results)
    with pytest.raises(ValueError, match="num_threads is -1"):
        rapt.set_num_threads(-1)


def test_every_public_name_is_documented() -> None:
    for name in set(rapt.__all__) - {"__version__"}:
        assert (getattr(rapt, name).__doc__ or "").strip(), name


def test_python_threads() -> None:
    expected = compute()
    layer = rapt.MultiheadAttention(32, 4, batch_first=True)
    out = layer(X[0], X[0], X[0])[0]

    def work(index: int) -> bool:
        if index % 7 == 0:
            rapt.set_num_threads(1 + index % 3)
        return bool((compute() == expected).all() and (layer(X[0], X[0], X[0])[0] == out).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(60)))
    for _ in range(100):  # threads that come and go, each with its context
        thread = threading.Thread(target=work, args=(1,))
        thread.start()
        thread.join()


def test_the_lock_is_released() -> None:
    rapt.set_num_threads(1)
    big = np.zeros((1, 8, 2048, 64), np.float32)
    done = threading.Event()
    counted = [0]

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    begin, before = time.perf_counter(), counted[0]
    rapt.scaled_dot_product_attention(big, big, big)
    took, counts = time.perf_counter() - begin, counted[0] - before
    done.set()
    thread.join()
    assert counts > 3 or took < 0.03


def _child(expected: np.ndarray) -> None:
    os._exit(0 if (compute() == expected).all() and rapt.get_num_threads() == 2 else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_another_thread_computes() -> None:
    expected = compute()
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            compute()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(10):
            child = multiprocessing.get_context("fork").Process(target=_child, args=(expected,))
            child.start()
            child.join(60)
            hung = child.exitcode is None
            if hung:
                child.kill()
            assert not hung and child.exitcode == 0
    finally:
        done.set()
        thread.join()
    assert (compute() == expected).all()


INTERRUPTED = """
import numpy as np, rapt, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, if whoever started the tests ignores it
x = np.zeros((1, 8, 4096, 64), np.float32)
rapt.scaled_dot_product_attention(x[:, :, :64], x, x)
print("ready", flush=True)
try:
    for _ in range(1000):
        y = rapt.scaled_dot_product_attention(x, x, x)
except KeyboardInterrupt:
    print("interrupted", (rapt.scaled_dot_product_attention(x, x, x) == 0).all(), flush=True)
"""


def test_interrupt() -> None:
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert out == "interrupted True\n" and process.returncode == 0


def test_tool() -> None:
    command = [sys.executable, "-m", "rapt"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert rapt.__version__ in done.stdout
    assert subprocess.run([*command, "nonsense"], capture_output=True).returncode == 2


def test_nothing_leaks() -> None:
    resource = pytest.importorskip("resource")
    if sys.platform != "linux":
        pytest.skip("ru_maxrss counts otherwise")
    x = np.zeros((4, 64, 64), np.float32)
    mask = np.ones((64, 64), bool)
    peaks = []
    for _ in range(2):
        for _ in range(3000):
            rapt.scaled_dot_product_attention(x, x, x, mask, key_lengths=[1, 2, 3, 4], return_lse=True)
            with pytest.raises(ValueError):
                rapt.scaled_dot_product_attention(x, x, x, mask[:3])
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 4096
