"""A random walk over kinds of arrays and ways to transfer them: no process may see another's later
writes. Workers import this module."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator, RemoteValue

ROUNDS = 60
COUNTS = (0, 1, 1000, 20_000, 50_000, 300_000)
DTYPES = ("u1", "<f4", ">f8", "c16", "M8[us]", "?", "U3", "S5")

_kept: list[np.ndarray[Any, Any]] = []


def seen_and_changed(
    arrays: list[np.ndarray[Any, Any]],
) -> tuple[list[bytes], list[np.ndarray[Any, Any]]]:
    """Return what the task saw, and arrays that it keeps, after writing to its arguments and to all
    earlier arguments and results."""
    seen = [array.tobytes() for array in arrays]
    for old in _kept:
        scribble(old, 0xAA)
    for array in arrays:
        scribble(array, 0x55)
    given = [np.frombuffer(bytearray(data), np.uint8) for data in seen]
    _kept.extend([*arrays, *given])
    del _kept[:-12]
    return seen, given


def scribble(array: np.ndarray[Any, Any], byte: int) -> None:
    if array.flags.writeable and array.nbytes:
        array.view("V" + str(array.dtype.itemsize))[...] = bytes([byte]) * array.dtype.itemsize


def make(dice: random.Random) -> np.ndarray[Any, Any]:
    dtype, count = np.dtype(dice.choice(DTYPES)), dice.choice(COUNTS)
    shape = (count,) if dice.random() < 0.5 else (count // 4, 4)
    array = (zd.empty if dice.random() < 0.5 else np.empty)(shape, dtype)
    raw = np.random.default_rng(dice.randrange(2**32)).integers(0, 2, array.nbytes, np.uint8)
    array.view(np.uint8).reshape(-1)[:] = raw
    way = dice.random()
    if way < 0.2:
        return zd.freeze(array)
    if way < 0.4:
        return array[::2]
    return np.asfortranarray(array) if way < 0.5 else array


def walk(cluster: zd.local_cluster, seed: int) -> None:
    """Pass arrays of all kinds to tasks in all ways, and change them in all processes
    afterwards.
    """
    dice = random.Random(seed)
    waiting: list[tuple[list[bytes], RemoteValue]] = []
    mine: list[np.ndarray[Any, Any]] = []
    with ClusterCoordinator(cluster) as coordinator:
        for _ in range(ROUNDS):
            arrays = [make(dice) for _ in range(dice.randint(1, 3))]
            expected = [array.tobytes() for array in arrays]
            waiting.append((expected, coordinator.schedule(seen_and_changed, (arrays,))))
            if dice.random() < 0.3:
                waiting.append((expected, coordinator.schedule(seen_and_changed, (arrays,))))
            for array in arrays:
                scribble(array, 0x77)
            mine += [array for array in arrays if array.flags.writeable]
            while len(waiting) > dice.randint(0, 6):
                wanted, value = waiting.pop(dice.randrange(len(waiting)))
                seen, given = value.fetch(30)
                assert seen == wanted
                assert [array.tobytes() for array in given] == wanted
                for array in given:
                    scribble(array, 0x11)
        for wanted, value in waiting:
            assert value.fetch(30)[0] == wanted
    for array in mine:
        raw = array.copy().view(np.uint8)
        assert (raw == 0x77).all(), "another process wrote to an array of the program"
