"""How many no-op functions go through a dispatcher and two worker processes: against a ProcessPoolExecutor."""

from __future__ import annotations

from collections.abc import Iterator

from zmqdist.observe.bench import Figure, Size, tasks


def run() -> Iterator[Figure]:
    yield from tasks(Size())
