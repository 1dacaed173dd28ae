"""Ray Data on two CPUs: datasets that are executed while they are read. No dashboard.

Ray Data computes blocks of rows, and starts an execution for each iterator. Each measurement reads
at least MIN_* elements, and so takes longer than those of the other systems, so that the start is a
small part of the time.
"""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from typing import Any

from benchmarks.peers.served import run
from benchmarks.peers.streams import (
    ARRAY_MOD,
    WORKERS,
    Loader,
    firsts,
    picture,
    pictures,
    streamed,
    streamed_bytes,
)

STORE_BYTES = 4 * 2**30
MIN_NUMBERS = 500_000
MIN_ARRAYS = 512
MIN_PICTURES = 512
ARRAYS_OF_BATCH = 8


class RayData(Loader):
    package = "ray"

    @cached_property
    def _data(self) -> Any:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray
        import ray.data

        ray.init(
            num_cpus=WORKERS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=STORE_BYTES,
            _temp_dir=os.path.join(tempfile.gettempdir(), "ray"),
        )
        self.stack.callback(ray.shutdown)
        ray.data.DataContext.get_current().enable_progress_bars = False
        return ray.data

    def data_elements(self, count: int, batch: int) -> list[float]:
        count = max(count, MIN_NUMBERS)
        dataset = self._data.range(count + batch)
        if batch == 1:
            return streamed(lambda: (row["id"] for row in dataset.iter_rows()), count)
        return streamed(lambda: dataset.iter_batches(batch_size=batch), count, batch)

    def data_arrays(self, count: int, size: int) -> list[float]:
        import numpy as np

        count = max(count, MIN_ARRAYS)
        base = np.ones(size, np.uint8)

        def add(rows: dict[str, Any]) -> dict[str, Any]:
            return {"array": base + (rows["id"] % ARRAY_MOD).astype(np.uint8)[:, None]}

        dataset = self._data.range(count).map_batches(add, batch_size=ARRAYS_OF_BATCH)
        batches = dataset.iter_batches(batch_size=None)
        return streamed_bytes(
            lambda: (array for batch in batches for array in batch["array"]), count, size
        )

    def data_images(self, count: int, workers: int) -> list[float]:
        count = max(count, MIN_PICTURES)
        names = pictures()

        def read(row: dict[str, Any]) -> dict[str, Any]:
            return {"image": picture(names[row["id"] % len(names)])}

        dataset = self._data.range(count).map(read, concurrency=workers)
        return streamed(lambda: (row["image"] for row in dataset.iter_rows()), count)

    def data_first(self, count: int) -> list[float]:
        dataset = self._data.range(1000)
        return firsts(dataset.iter_rows, count)

    def data_start(self) -> list[float]:
        next(iter(self._data.range(1000).iter_rows()))
        return []


if __name__ == "__main__":
    run(RayData)
