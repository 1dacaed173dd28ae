"""Servers in other processes and random arrays, for the tests of large arrays."""

from __future__ import annotations

import random
import subprocess
from typing import Any

import numpy as np

from zmqdist.limits import CHUNK_BYTES
from zmqdist.rpc import ZmqClient

MIB = 2**20

SERVER = """
import sys, numpy as np
from zmqdist.rpc import Server
kept = []
state = np.zeros(2**20, np.int64)
def keep(array):
    kept.append(array)
    return len(kept)
def step(array):  # changes its argument and its own array right before and after it has answered
    array += 1
    state[:] = array[:len(state)]
    return state
def spoil():
    for array in kept:
        array[:] = 99
    state[:] = 99
    return [int(array[0]) for array in kept]
server = Server.create("zmq", "127.0.0.1:0")
for name, fn in {"echo": lambda value: value, "keep": keep, "step": step, "spoil": spoil, "forget": kept.clear,
                 "total": lambda array: int(array.sum()), "ones": lambda n: np.ones(n, np.uint8)}.items():
    server.register(name, fn)
server.register("small", lambda value: value, inline=True)
server.start()
print(server.address, flush=True)
sys.stdin.read()
"""


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def change_everything_after_each_call(remote: ZmqClient, seed: int) -> None:
    """Arrays of any dtype, shape and order are changed right after each call; the handlers do the
    same with theirs."""
    rng = random.Random(seed)
    pending: list[tuple[Any, Any]] = []
    for _ in range(8):
        array = some_array(rng)
        given = {"one": array, "two": [array[: len(array) // 2], 7]}
        wanted = {"one": array.copy("K"), "two": [array[: len(array) // 2].copy(), 7]}
        if rng.random() < 0.5:
            pending.append((remote.echo(given), wanted))
        else:
            check(remote.echo_blocking(given), wanted)
        spoil(array)
    for outcome, wanted in pending:
        got = outcome.get_value()
        check(got, wanted)
        spoil(got["one"])  # private and writable
        check(got["two"], wanted["two"])


def some_array(rng: random.Random) -> np.ndarray[Any, Any]:
    dtype = np.dtype(
        rng.choice(["u1", "<f4", ">i8", "c16", "S5", "<M8[s]", [("a", "<i4"), ("b", "<f8", (3,))]])
    )
    count = rng.choice([1000, CHUNK_BYTES, 3 * MIB, 9 * MIB]) // dtype.itemsize // 6 * 6
    raw = np.random.default_rng(rng.randrange(2**32)).integers(
        0, 100, count * dtype.itemsize, np.uint8
    )
    array = raw.view(dtype).reshape(rng.choice([(count,), (count // 2, 2), (count // 6, 2, 3)]))
    return (
        np.asfortranarray(array)
        if rng.random() < 0.3
        else array[::2]
        if rng.random() < 0.2
        else array
    )


def spoil(array: np.ndarray[Any, Any]) -> None:
    assert array.flags.writeable
    array[...] = np.zeros((), array.dtype)


def check(got: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            check(got[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(got, wanted, strict=True):
            check(one, other)
    elif isinstance(wanted, np.ndarray):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes()
    else:
        assert got == wanted
