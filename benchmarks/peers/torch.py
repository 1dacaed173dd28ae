"""PyTorch's DataLoader with worker processes that stay from epoch to epoch, as its documentation
recommends for speed.

Single elements are read with `batch_size=None`, and batches are made by `__getitems__`. Arrays are
tensors in shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.peers.served import run
from benchmarks.peers.streams import (
    ARRAY_MOD,
    ENDLESS,
    WORKERS,
    Loader,
    firsts,
    picture,
    pictures,
    streamed,
    streamed_bytes,
)


class Numbers:
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Any:
        return number

    def __getitems__(self, numbers: list[int]) -> Any:
        return numbers


class Arrays(Numbers):
    def __init__(self, size: int) -> None:
        import numpy as np

        self.base = np.ones(size, np.uint8)

    def __getitem__(self, number: int) -> Any:
        import torch

        return torch.from_numpy(self.base + self.base.dtype.type(number % ARRAY_MOD))


class Pictures(Numbers):
    def __init__(self) -> None:
        self.names = pictures()

    def __getitem__(self, number: int) -> Any:
        import torch

        return torch.from_numpy(picture(self.names[number % len(self.names)]))


class Torch(Loader):
    package = "torch"

    @cache  # noqa: B019 (as long as the process)
    def _loader(
        self, kind: type[Numbers], *arguments: Any, batch: int = 1, workers: int = WORKERS
    ) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(
            kind(*arguments),  # type: ignore[arg-type, unused-ignore]
            batch_size=batch if batch > 1 else None,
            num_workers=workers,
            persistent_workers=True,
        )

    def data_elements(self, count: int, batch: int) -> list[float]:
        loader = self._loader(Numbers, batch=batch)
        return streamed(lambda: loader, count, batch)

    def data_arrays(self, count: int, size: int) -> list[float]:
        loader = self._loader(Arrays, size)
        return streamed_bytes(lambda: loader, count, size)

    def data_images(self, count: int, workers: int) -> list[float]:
        loader = self._loader(Pictures, workers=workers)
        return streamed(lambda: loader, count)

    def data_first(self, count: int) -> list[float]:
        loader = self._loader(Numbers)
        return firsts(lambda: loader, count)

    def data_start(self) -> list[float]:
        next(iter(self._loader(Numbers)))
        return []


if __name__ == "__main__":
    run(Torch)
