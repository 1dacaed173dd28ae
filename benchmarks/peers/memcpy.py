"""A copy between two warm arrays by one thread, instead of a system. No system that copies an array
can be faster."""

from __future__ import annotations

from time import perf_counter

from benchmarks.peers.served import System, run


class Memcpy(System):
    package = "numpy"

    def answers(self) -> list[str]:
        return ["bandwidth"]

    def bandwidth(self, count: int, size: int) -> list[float]:
        import numpy as np

        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        values = []
        for _ in range(count):
            start = perf_counter()
            np.copyto(target, source)
            values.append(size / (perf_counter() - start))
        return values


if __name__ == "__main__":
    run(Memcpy)
