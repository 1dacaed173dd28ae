"""Share two GPUs among trainings, while other functions prepare their data.

    python examples/gpus.py

A training takes one GPU, the last one both. What prepares data needs none and runs beside them.
The program needs no GPU: the cluster says that it has two, so that one can see who gets which.
"""

import os
import time

import numpy as np

import zmqdist as zd


def prepare(seed):
    """Runs on any slot."""
    return np.random.default_rng(seed).normal(size=(20_000, 16))


def train(rows, epochs):
    """Runs in a process that sees only the GPUs of this training: `cuda:0` is its first."""
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    began = time.monotonic()
    for _ in range(epochs):
        time.sleep(0.05)  # where a training would use its GPUs
    return len(rows), gpus, began, time.monotonic()


def main():
    resources = {"gpu": 2, "memory_gb": 16}
    with (
        zd.local_cluster(workers=1, slots=4, resources=resources, memory_max_gb=2) as cluster,
        cluster.coordinator() as coordinator,
    ):
        single = coordinator.options(resources={"gpu": 1, "memory_gb": 2})
        double = coordinator.options(resources={"gpu": 2, "memory_gb": 8})
        data = coordinator.map(prepare, range(6))
        small = [single.submit(train, rows, 4) for rows in data]  # each waits for its own rows
        large = double.submit(train, data[0], 2)
        for number, value in enumerate([*small, large]):
            count, gpus, _, _ = value.result()
            print(f"training {number}: {count:,} rows, {len(gpus)} of 2 GPUs")
        runs = [value.result() for value in [*small, large]]
        used = sum((end - began) * len(gpus) for _, gpus, began, end in runs)
        lasted = max(end for *_, end in runs) - min(began for *_, began, _ in runs)
        print(f"the GPUs were in use for {used / lasted / 2:.0%} of the time")


if __name__ == "__main__":
    main()
