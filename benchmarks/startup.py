"""How long from the start of Python to the first result, and what the import costs."""

from __future__ import annotations

from collections.abc import Iterator

from zmqdist.observe.bench import Figure, Size, imported, start


def run() -> Iterator[Figure]:
    yield start(Size())
    yield from imported(Size())
