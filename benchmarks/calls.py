"""How long does a call take, how many go through in a second, how many bytes: against bare ZeroMQ."""

from __future__ import annotations

from collections.abc import Iterator

from zmqdist.observe.bench import Figure, Size, calls


def run() -> Iterator[Figure]:
    yield from calls(Size())
