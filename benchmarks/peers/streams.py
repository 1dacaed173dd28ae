"""The common part of the systems that answer the questions `data_*`: the elements, the images, and
the timing of a stream of elements.

A pipeline runs on two workers. Its source counts, and an element is the number itself, or an array
of a given size to which the number was added, or one of `PICTURES` images as float32. All systems
compute equal elements, and compute each element anew.

A block is one iterator. The time begins when the iterator is made, so that no element is in a
buffer yet, and ends with the last element.

This module imports only the standard library. Its functions import NumPy and Pillow when they need
them.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from time import perf_counter
from typing import Any, Final

from benchmarks.peers.served import System

QUESTIONS: Final = frozenset(
    {"data_elements", "data_arrays", "data_images", "data_first", "data_start"}
)
ENDLESS: Final = 10**9
"""Number of elements of a pipeline that no benchmark reads to its end."""
WORKERS: Final = 2
PICTURES: Final = 64
WIDTH, HEIGHT, SIDE = 500, 375, 224
ARRAY_MOD: Final = 250


class Loader(System):
    """A system that answers questions about data only."""

    def answers(self) -> list[str]:
        return [name for name in super().answers() if name in QUESTIONS]


def streamed(elements: Callable[[], Iterable[Any]], count: int, each: int = 1) -> list[float]:
    """Make an iterator and take its first `count` elements, in batches of `each`. Return the
    elements a second, in a list."""
    batches = -(-count // each)
    start = perf_counter()
    iterator = iter(elements())
    taken = sum(1 for _ in itertools.islice(iterator, batches))
    took = perf_counter() - start
    if taken != batches:
        raise ValueError(f"{taken} of {batches} came")
    return [taken * each / took]


def streamed_bytes(arrays: Callable[[], Iterable[Any]], count: int, size: int) -> list[float]:
    """Make an iterator and take its first `count` arrays of `size` bytes. Check the length of each
    array, and whether its first and last item are equal. Return the bytes a second, in a list."""

    def looked_at() -> Iterator[Any]:
        for array in arrays():
            if len(array) != size or array[0] != array[-1]:
                raise ValueError(f"{size} bytes were sent and others came")
            yield array

    return [size * found for found in streamed(looked_at, count)]


def firsts(elements: Callable[[], Iterable[Any]], count: int) -> list[float]:
    """Make `count` iterators one after the other. For each, return the seconds from its making to
    its first element."""
    took = []
    for _ in range(count):
        start = perf_counter()
        iterator = iter(elements())
        next(iterator)
        took.append(perf_counter() - start)
    return took


class Servers:
    """Modules that run in processes of their own until `stack` is closed. Each process prints a
    line when it is ready."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._starting: list[subprocess.Popen[bytes]] = []

    def start(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stack.callback(process.communicate)
        self._stack.callback(process.terminate)
        self._starting.append(process)

    def ready(self) -> None:
        """Wait until each started process is ready."""
        while self._starting:
            process = self._starting.pop(0)
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"{process.args!r} ended before it had begun")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@cache
def pictures() -> list[str]:
    """Make PICTURES JPEG files of 500 x 375, and return their names. The images are smooth with
    some noise, and have about 60 KB each. They are equal in all runs, because the seed is fixed."""
    import numpy as np
    from PIL import Image

    folder = tempfile.mkdtemp(prefix="pictures-")
    random = np.random.default_rng(1)
    names = []
    for number in range(PICTURES):
        small = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + random.integers(-12, 13, smooth.shape), 0, 255).astype(np.uint8)
        names.append(os.path.join(folder, f"{number}.jpg"))
        Image.fromarray(noisy).save(names[-1], quality=90)
    return names


def picture(name: Any) -> Any:
    """Return the image in a file: decoded, resized to 224 x 224, flipped, and converted to
    float32.
    """
    import numpy as np
    from PIL import Image

    with Image.open(os.fsdecode(name)) as image:
        small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        return np.asarray(small.transpose(Image.Transpose.FLIP_LEFT_RIGHT), np.float32)
