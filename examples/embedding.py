"""Learn which things a person clicks on, with a table of a million rows at two parameter servers. Each step uses a few hundred rows.

    python examples/embedding.py [--steps 300]

An impression is a person, a thing that the person was shown, and whether the person clicked it. Each person and each thing has a row in the
table. The larger the dot product of the two rows, the more likely is a click. The frequencies of people and things follow Zipf's law, as
those of words do: a few rows are in most batches, and most rows are in none.

Each step runs on any free worker. It requests the rows of its batch from both servers at the same time, computes the gradient of the
logistic loss for each of these rows, and has the servers make a step of Adagrad with the gradients. Adagrad keeps its sums beside the
table, on the servers. Only the rows of the batch are transferred. The worker makes the impressions from the number of the step; a real
program would read them on the worker, from a per-worker dataset.
"""

import argparse
import time

import numpy as np

import zmqdist as zd

ROWS, WIDTH = 1_000_000, 64
PEOPLE = ROWS // 2  # the first half of the table; the things have the other
BATCH = 512
OPTIMIZER = zd.optimizers.Adagrad(0.1)
TOLD = 10  # the loss is printed so many times


def impressions(step):
    """Return the people, things and clicks of a batch. Each row has a hidden taste, computed from its number; training has to find it."""
    rng = np.random.default_rng(step)
    people = rng.zipf(1.3, BATCH) % PEOPLE
    things = PEOPLE + rng.zipf(1.3, BATCH) % PEOPLE
    likes = (people % 7 + things % 5) % 2 == 0
    return people, things, (likes ^ (rng.random(BATCH) < 0.05)).astype(np.float32)


def gradients(people, things, clicks):
    """The mean loss, and the gradient of the sum by the row of each person and of each thing: with that of the mean, the step of a row
    would depend on how many others are in the batch."""
    logits = (people * things).sum(axis=1)
    loss = np.logaddexp(0, logits) - clicks * logits
    error = (1 / (1 + np.exp(-logits)) - clicks)[:, np.newaxis]
    return float(loss.mean()), error * things, error * people


def step(table, number):
    """Runs on a worker: pull, compute, push. Returns the loss."""
    people, things, clicks = impressions(number)
    ids, places = np.unique(np.concatenate([people, things]), return_inverse=True)
    rows = table.sparse_read(ids)[places]
    loss, *grads = gradients(rows[:BATCH], rows[BATCH:], clicks)
    table.apply(OPTIMIZER, zd.IndexedSlices(np.concatenate(grads), ids[places]))
    return loss, len(ids)


def part(partition_shape, partition_offset):
    """The first values of a shard, made where it lives: nothing of the table is ever sent as a whole."""
    return np.random.default_rng(partition_offset[0]).standard_normal(partition_shape, np.float32) * np.float32(0.3)


def train(strategy, steps):
    """Returns the mean losses of `TOLD` stretches of the training."""
    with strategy.scope():
        table = zd.Variable(part, shape=(ROWS, WIDTH), dtype=np.float32, name="embedding")
    losses = []
    for numbers in np.array_split(np.arange(steps), TOLD):
        start = time.perf_counter()
        results = strategy.coordinator.fetch(strategy.coordinator.map(lambda number: step(table, number), numbers))
        took = time.perf_counter() - start
        losses.append(float(np.mean([loss for loss, _ in results])))
        moved = sum(count for _, count in results)
        print(
            f"step {numbers[-1] + 1:4}/{steps}  loss {losses[-1]:.4f}  {moved / took:9,.0f} rows/s pulled and pushed",
            flush=True,
        )
    return losses


def main():
    parser = argparse.ArgumentParser(description="Learn an embedding of a million rows at two parameter servers.")
    parser.add_argument("--steps", type=int, default=300, help="batches of 512 impressions (default: 300)")
    steps = max(TOLD, parser.parse_args().steps)
    halves = zd.partitioners.FixedShardsPartitioner(2)
    with zd.local_cluster(workers=2, ps=2) as cluster, zd.ParameterServerStrategy(cluster, halves) as strategy:
        losses = train(strategy, steps)
    print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


if __name__ == "__main__":
    main()
