"""The fingerprint of arrays: every byte, shape and stride counts, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rapt._core import fingerprint

MAX_DIMS, F32 = 8, 1  # RAPT_MAX_DIMS, RAPT_F32


def bytes_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, count).astype(bool)  # one byte each


@pytest.mark.parametrize("count", [1, 7, 8, 63, 64, 65, 127, 128, 200, 1000])
def test_every_byte_counts(count: int) -> None:
    array = bytes_of(count)
    found = {fingerprint(array)}
    for i in range(count):
        array[i] ^= True
        found.add(fingerprint(array))
        array[i] ^= True
    assert len(found) == count + 1 and fingerprint(array) in found


@pytest.mark.parametrize("count", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_017, (5 << 20) + 64])
def test_bytes_of_long_arrays_count(count: int) -> None:
    """They are read in parts: around the ends of parts, whatever their size, and in places drawn at random."""
    array = bytes_of(count)
    ends = np.arange(17) * (count // 16 // 64) * 64
    places = {int(end + step) for end in ends for step in (-1, 0, 63, 64, 128, 16 * 64)} | {0, count - 65, count - 1}
    places = {i for i in places if 0 <= i < count} | set(np.random.default_rng(5).integers(0, count, 60).tolist())
    found = {fingerprint(array)}
    for i in places:
        array[i] ^= True
        found.add(fingerprint(array))
        array[i] ^= True
    assert len(found) == len(places) + 1 and fingerprint(array.copy()) in found


def test_order_of_parts_counts() -> None:
    parts = bytes_of(1 << 20).reshape(16, -1)
    assert fingerprint(parts) != fingerprint(parts[[1, 0, *range(2, 16)]])


def test_every_bit_counts() -> None:
    array = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    bits = array.view(np.uint32)
    found = {fingerprint(array)}
    for i, bit in itertools.product((0, 1, 15, 16, 150, 298, 299), range(32)):
        bits[i] ^= np.uint32(1 << bit)
        found.add(fingerprint(array))
        bits[i] ^= np.uint32(1 << bit)
    assert len(found) == 7 * 32 + 1


def test_order_and_pairs_of_changes_count() -> None:
    array = np.random.default_rng(2).standard_normal(256).astype(np.float32)
    before = fingerprint(array)
    found = set()
    for i, j in itertools.combinations(range(0, 256, 5), 2):
        swapped, turned = array.copy(), array.copy()
        swapped[[i, j]] = swapped[[j, i]]
        turned[[i, j]] *= -1
        found |= {fingerprint(swapped), fingerprint(turned)}
    pairs = len(list(itertools.combinations(range(0, 256, 5), 2)))
    assert len(found) == 2 * pairs and before not in found
    assert fingerprint(-array) != before and fingerprint(array[::-1]) != before


def test_equal_arrays_are_equal() -> None:
    array = np.random.default_rng(3).standard_normal((5, 6, 7))
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]  # at an odd address
    raw[:] = array.view(np.uint8).ravel()
    assert fingerprint(array) == fingerprint(array.copy()) == fingerprint(raw.view(np.float64).reshape(5, 6, 7))
    for view in (array[:, 1:4], array[::2, ::3, ::2], array.transpose(2, 0, 1), array[:, ::-1], array[..., :1]):
        offset = view.__array_interface__["data"][0] - array.__array_interface__["data"][0]
        twin = np.ndarray(view.shape, view.dtype, array.copy().data, offset, view.strides)
        assert fingerprint(twin) == fingerprint(view)


@pytest.mark.parametrize("turn", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("part", [np.s_[:, :, :], np.s_[1:4, ::2, :], np.s_[:, :, 1::3], np.s_[::-1, 2, ::-2]])
def test_strided_views_are_seen_whole(turn: tuple[int, ...], part: tuple[slice | int, ...]) -> None:
    array = np.random.default_rng(4).standard_normal((5, 6, 7)).astype(np.float32)
    view = array.transpose(turn)[part]
    inside = np.zeros(array.shape, bool)
    inside.transpose(turn)[part] = True
    before = fingerprint(view)
    for at in np.ndindex(array.shape):
        number = array[at]
        array[at] += 1
        assert (fingerprint(view) != before) == inside[at]
        array[at] = number
    assert fingerprint(view) == before


def test_shapes_types_and_numbers_of_arrays_count() -> None:
    zeros = np.zeros((4, 4), np.float32)
    different = [
        (zeros,),
        (zeros, None),
        (None, zeros),
        (zeros, zeros),
        (zeros.reshape(2, 8),),
        (zeros.T,),
        (zeros.reshape(16),),
        (zeros.view(np.float64),),
        (np.broadcast_to(zeros[:1], (4, 4)),),
        (np.zeros((5, 4), np.float32),),
        (np.zeros((0, 4), np.float32),),
        (np.zeros((4, 0), np.float32),),
        (np.float32(0) * np.zeros(()),),
        (),
        (None,),
    ]
    assert len({fingerprint(*arrays) for arrays in different}) == len(different)
    assert fingerprint(np.broadcast_to(zeros[:1], (4, 4))) == fingerprint(np.broadcast_to(zeros[:1].copy(), (4, 4)))
    with pytest.raises(TypeError, match="array is"):
        fingerprint("text")
    with pytest.raises(TypeError, match="int64"):
        fingerprint(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="41 arrays"):
        fingerprint(*[zeros] * 41)


def reference(array: np.ndarray) -> int:
    """The fingerprint of one contiguous array of float32, by the description in python/src/fingerprint.c."""
    sizes = [number for n, stride in zip(array.shape, array.strides) for number in (n, stride // array.itemsize)]
    header = [1, 1, F32, array.ndim, *sizes, *([0] * (2 * MAX_DIMS - len(sizes)))]
    stream = np.array(header, np.int64).tobytes() + array.tobytes()
    stream += bytes(64 - len(stream) % 64)
    words = np.frombuffer(stream, np.uint64).reshape(-1, 8)
    odd, half = 0x9E3779B97F4A7C15, np.uint64(32)
    keys = np.array(
        [
            [(0x243F6A8885A308D3 + 0x13198A2E03707344 * i + block * odd) % 2**64 for i in range(8)]
            for block in range(len(words))
        ],
        np.uint64,
    )
    mixed = words ^ keys
    products = ((mixed & np.uint64(0xFFFFFFFF)) * (mixed >> half)).sum(0, dtype=np.uint64)
    sums = products + words.sum(0, dtype=np.uint64)[[1, 0, 3, 2, 5, 4, 7, 6]]
    found = 0
    for number in map(int, sums):
        found = (found ^ number ^ number >> 32) * odd % 2**64
        found ^= found >> 29
    return found


@pytest.mark.parametrize("count", [1, 3, 16, 31, 64, 1000, 4099])
def test_any_instructions_give_the_same(count: int) -> None:
    array = np.random.default_rng(5).standard_normal(count).astype(np.float32)
    assert fingerprint(array) == reference(array)
