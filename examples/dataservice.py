"""Prepare the images of a training on other processes, each exactly once, though a worker dies.

    python examples/dataservice.py

What stands before `distribute` runs on the workers, what stands after it in this program.
"""

import collections

import network
import numpy as np

import zmqdist as zd

(IMAGES, LABELS), _ = network.load(np.random.default_rng(0))


def augmented(number):
    """Image `number`, turned by a random angle: with this seed the same one on any worker."""
    number = int(number)
    angle = np.random.default_rng(number).normal(0, 0.2)
    y, x = np.mgrid[-3.5:4.5, -3.5:4.5]
    turned_y = np.clip(np.rint(np.cos(angle) * y - np.sin(angle) * x + 3.5), 0, 7).astype(int)
    turned_x = np.clip(np.rint(np.sin(angle) * y + np.cos(angle) * x + 3.5), 0, 7).astype(int)
    return {"image": IMAGES[number].reshape(8, 8)[turned_y, turned_x], "number": number}


def main():
    with zd.local_cluster(workers=3) as cluster:
        remote = zd.data.service.distribute("distributed_epoch", cluster, delivery="exactly_once")
        dataset = zd.data.Dataset.range(len(LABELS)).map(augmented).apply(remote).batch(32)
        seen: collections.Counter[int] = collections.Counter()
        for step, batch in enumerate(dataset):
            seen.update(batch["number"].tolist())
            if step == 0:
                print({name: (array.shape, array.dtype.name) for name, array in batch.items()})
            if step == 10:
                cluster.kill_worker(0)  # kill -9
    print(f"{len(seen)} images in {step + 1} batches, each {set(seen.values())} times")


if __name__ == "__main__":
    main()
