"""Learn who clicks on what, with a table of a million rows on two parameter servers.

    python examples/embedding.py [--steps 300]

An impression is a person, a thing that was shown, and whether it was clicked. Persons and things
have rows; the larger the dot product of two rows, the more likely is a click. As with words, a few
rows are in most batches and most rows in none, so a step uses a few hundred of them. A worker gets
these rows from both servers at once, computes the gradient of the logistic loss, and has the
servers make a step of Adagrad, whose sums live beside the table. Here a worker makes up the
impressions; a real program would read them, from a per-worker dataset.
"""

import argparse
import time

import numpy as np

import zmqdist as zd

ROWS, WIDTH, BATCH = 1_000_000, 64, 512
PEOPLE = ROWS // 2  # the first half of the table; the things have the other
OPTIMIZER = zd.optimizers.Adagrad(0.1)


def impressions(step):
    """People, things and clicks of a batch. Training has to find the taste that a number hides."""
    rng = np.random.default_rng(step)
    people = rng.zipf(1.3, BATCH) % PEOPLE
    things = PEOPLE + rng.zipf(1.3, BATCH) % PEOPLE
    likes = (people % 7 + things % 5) % 2 == 0
    return people, things, (likes ^ (rng.random(BATCH) < 0.05)).astype(np.float32)


def gradients(people, things, clicks):
    """The mean loss, and the gradients of the sum: no row's step depends on the other rows."""
    logits = (people * things).sum(axis=1)
    loss = np.logaddexp(0, logits) - clicks * logits
    error = (1 / (1 + np.exp(-logits)) - clicks)[:, np.newaxis]
    return float(loss.mean()), error * things, error * people


def step(table, number):
    """Runs on a worker: pull, compute, push. Returns the loss and the number of rows."""
    people, things, clicks = impressions(number)
    ids, places = np.unique(np.concatenate([people, things]), return_inverse=True)
    rows = table.sparse_read(ids)[places]
    loss, *grads = gradients(rows[:BATCH], rows[BATCH:], clicks)
    table.apply(OPTIMIZER, zd.IndexedSlices(np.concatenate(grads), ids[places]))
    return loss, len(ids)


def part(partition_shape, partition_offset):
    """The first values of a shard, made where it lives: the table never travels as a whole."""
    rng = np.random.default_rng(partition_offset[0])
    return rng.standard_normal(partition_shape, np.float32) * np.float32(0.3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="batches of 512 impressions")
    steps = max(10, parser.parse_args().steps)
    halves, losses = zd.partitioners.FixedShardsPartitioner(2), []
    cluster = zd.local_cluster(workers=2, ps=2)
    with cluster, zd.ParameterServerStrategy(cluster, halves) as strategy:
        with strategy.scope():
            table = zd.Variable(part, shape=(ROWS, WIDTH), dtype=np.float32)
        for numbers in np.array_split(np.arange(steps), 10):
            start = time.perf_counter()
            values = strategy.coordinator.map(lambda number: step(table, number), numbers)
            some, counts = zip(*strategy.coordinator.gather(values), strict=True)
            losses.append(np.mean(some))
            rate = sum(counts) / (time.perf_counter() - start)
            told = f"loss {losses[-1]:.4f}  {rate:9,.0f} rows/s pulled and pushed"
            print(f"step {numbers[-1] + 1:4}/{steps}  {told}", flush=True)
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


if __name__ == "__main__":
    main()
