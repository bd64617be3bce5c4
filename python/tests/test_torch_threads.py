"""Beside PyTorch, its threads compute: as many as it has, but for numbers of Rapt's own, and not in forked children."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt  # noqa: E402
import rapt.torch  # noqa: E402
from rapt import _core  # noqa: E402

pytestmark = pytest.mark.skipif("RAPT_NUM_THREADS" in os.environ, reason="Rapt has a number of its own")


@pytest.fixture(autouse=True)
def restored():
    before = torch.get_num_threads()
    torch.manual_seed(0)
    rapt.set_num_threads(0)
    yield
    torch.set_num_threads(before)
    rapt.set_num_threads(0)


def attend(tensor):
    return rapt.torch.scaled_dot_product_attention(tensor, tensor, tensor)


def test_numbers():
    for count in (1, 3, 2):
        torch.set_num_threads(count)
        assert rapt.get_num_threads() == count
    rapt.set_num_threads(3)
    torch.set_num_threads(1)
    assert rapt.get_num_threads() == 3
    rapt.set_num_threads(0)
    assert rapt.get_num_threads() == 1


def test_bits():
    x = torch.randn(2, 4, 300, 32)
    rapt.set_num_threads(1)
    expected = attend(x)
    rapt.set_num_threads(0)
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(attend(x), expected)


def test_fingerprints():
    weights = torch.randn(1 << 19)  # 2 MB, which threads read in parts
    found = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.add(_core.fingerprint(weights))
    rapt.set_num_threads(2)
    found.add(_core.fingerprint(weights))
    assert len(found) == 1


def test_threads_of_python():
    x = torch.randn(2, 4, 300, 32)
    expected, wrong = attend(x), []

    def work():
        for _ in range(5):
            if not torch.equal(attend(x), expected):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.parametrize("what", ["operator", "layer", "backward"])
def test_the_lock_is_released(what):
    torch.set_num_threads(1)
    x = torch.randn(1, 8, 1024, 64, requires_grad=what == "backward")
    layer = rapt.torch.MultiheadAttention(512, 8, batch_first=True).eval().requires_grad_(False)
    tokens, out = torch.randn(1, 2048, 512), attend(x)
    call = {
        "operator": lambda: attend(x),
        "layer": lambda: layer(tokens, tokens, tokens, need_weights=False),
        "backward": lambda: out.backward(torch.ones_like(out), retain_graph=True),
    }[what]
    call()  # packs weights
    done, counted = threading.Event(), [0]

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.0001)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(50):  # a busy machine may not let the other thread run in each of them
            before = counted[0]
            call()
            if counted[0] - before > 5:  # between two instructions of this thread it is one
                break
        else:
            pytest.fail("nothing ran beside the call")
    finally:
        done.set()
        thread.join()


INTERRUPTED = """
import os, signal, threading, torch, rapt.torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, if whoever started the tests ignores it
x, tokens = torch.zeros(1, 8, 1024, 64, requires_grad=True), torch.zeros(1, 1024, 512)
layer = rapt.torch.MultiheadAttention(512, 8, batch_first=True).eval()
def operator():
    return rapt.torch.scaled_dot_product_attention(x.detach(), x.detach(), x.detach())
def packed():
    with torch.no_grad():
        return layer(tokens, tokens, tokens, need_weights=False)[0]
def backward():
    return torch.autograd.grad(rapt.torch.scaled_dot_product_attention(x, x, x).sum(), x)[0]
for call in (operator, packed, backward):
    expected = call()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        for _ in range(100000):
            call()
    except KeyboardInterrupt:
        print("interrupted", torch.equal(call(), expected), flush=True)
    timer.join()
"""


def test_interrupt():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "interrupted True\n" * 3), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
@pytest.mark.parametrize("count", [2, 1])
def test_children(count):
    """PyTorch's threads are gone in a child, and its loops may wait for them for ever; Rapt starts its own, as many."""
    torch.set_num_threads(2)
    x = torch.randn(2, 4, 300, 32)
    expected = attend(x)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        torch.set_num_threads(count)  # as PyTorch does in workers that load data
        is_equal = (attend(x).numpy() == expected.numpy()).all()
        os._exit(0 if is_equal and rapt.get_num_threads() == count else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rapt.get_num_threads() == 2


def test_a_number_in_the_environment():
    code = "import torch, rapt.torch; torch.set_num_threads(1); print(rapt.get_num_threads())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAPT_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "3\n"


def test_no_threads_to_borrow():
    functions = rapt.torch._libtorch.addresses("torch_parallel_for", "torch_get_num_threads")
    assert functions is not None and all(functions)
    assert rapt.torch._libtorch.addresses("torch_parallel_for", "rapt_has_no_such_function") is None
    torch.set_num_threads(3)
    try:
        rapt._core.borrow_threads(None, None)
        expected = subprocess.run(
            [sys.executable, "-c", "import rapt; print(rapt.get_num_threads())"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert rapt.get_num_threads() == int(expected.stdout)
    finally:
        rapt.torch._libtorch.share_threads()
    rapt.set_num_threads(0)
    assert rapt.get_num_threads() == 3
    with pytest.raises(TypeError):
        rapt._core.borrow_threads("here", "there")
    assert rapt.get_num_threads() == 3
