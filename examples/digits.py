"""Train a small network on handwritten digits: workers make the batches and compute the gradients, the weights stay here.

    zmqdist launch configs/digits.yaml      on the cluster of that file
    python examples/digits.py               on two workers of its own

The batches come through the data service, each one once and in order, whoever made it. Each step splits its batch into shards, schedules
the gradient of each and sums them in the order of the shards. So the result is the same to the last bit with any number of workers, and
also when one dies on the way: its batches and shards are made again elsewhere.
"""

import contextlib
import itertools
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import zmqdist as zd

EPOCHS, BATCH, SHARDS, HIDDEN = 30, 96, 4, 64
STEPS = 15  # of an epoch: its last batch is smaller
RATE, MOMENTUM = 0.1, 0.9
TRAINING = 1_437  # of 1,797 images; the other 360 are the test


def load(rng):
    """Training and test set, each (n, 64) pixels of 0 to 16 and (n,) digits, uint8."""
    rows = np.loadtxt(Path(__file__).parent / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
    rows = rng.permutation(rows)
    return (rows[:TRAINING, :64], rows[:TRAINING, 64]), (rows[TRAINING:, :64], rows[TRAINING:, 64])


def batches(images, labels):
    """All batches of the training: each epoch has the images in an order of its own, which its number decides."""

    def batch(step):
        number, at = divmod(int(step), STEPS)
        order = np.random.default_rng(number).permutation(len(labels))[at * BATCH : (at + 1) * BATCH]
        return images[order], labels[order]

    spec = zd.TensorSpec((None, 64), np.uint8), zd.TensorSpec((None,), np.uint8)
    return zd.data.Dataset.range(EPOCHS * STEPS).map(batch, output_signature=spec)


def forward(weights, images):
    """Hidden layer and logits."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images / np.float32(16) @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradients(weights, images, labels):
    """Runs on a worker: the loss of a shard and its gradient by each weight, both summed over the images."""
    hidden, logits = forward(weights, images)
    logits = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    picked = np.arange(len(labels)), labels
    loss = -np.log(chances[picked]).sum()
    chances[picked] -= 1
    below = (chances @ weights[2].T) * (hidden > 0)
    return loss, [images.T / np.float32(16) @ below, below.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]


def accuracy(weights, images, labels):
    return float((forward(weights, images)[1].argmax(axis=1) == labels).mean())


def epoch(coordinator, weights, speed, batches):
    """The steps of one pass over the training set; changes `weights` and `speed`. Returns the mean loss."""
    total = count = 0
    for images, labels in batches:
        shards = np.array_split(np.arange(len(labels)), SHARDS)
        values = [coordinator.schedule(gradients, args=(weights, images[shard], labels[shard])) for shard in shards]
        losses, parts = zip(*coordinator.fetch(values), strict=True)
        for weight, velocity, *part in zip(weights, speed, *parts, strict=True):
            velocity *= MOMENTUM
            velocity -= RATE * sum(part) / len(labels)
            weight += velocity
        total += float(sum(losses))
        count += len(labels)
    return total / count


def train(coordinator, console):
    """Returns the losses and test accuracies, one of each per epoch."""
    rng = np.random.default_rng(0)
    (images, labels), test = load(rng)
    sizes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
    weights = [rng.normal(0, (2 / size[0]) ** 0.5 * (len(size) > 1), size).astype(np.float32) for size in sizes]
    speed = [np.zeros_like(weight) for weight in weights]
    service = zd.data.service.distribute("distributed_epoch", coordinator, ordered=True)
    steps = iter(batches(images, labels).apply(service))
    curve = []
    columns = TextColumn("epoch"), BarColumn(), TextColumn("{task.completed}/{task.total}  {task.description}")
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=EPOCHS)
        for number in range(1, EPOCHS + 1):
            loss = epoch(coordinator, weights, speed, itertools.islice(steps, STEPS))
            curve.append((loss, accuracy(weights, *test)))
            told = f"loss {loss:.4f}  accuracy {curve[-1][1]:.3f}"
            progress.update(bar, advance=1, description=told)
            if not console.is_terminal:
                print(f"epoch {number:2}/{EPOCHS}  {told}", flush=True)
    return list(zip(*curve, strict=True))


def draw(losses, accuracies, path):
    try:
        import matplotlib
    except ImportError:
        print("no learning curve: matplotlib is not installed (pip install 'zmqdist[examples]')")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, left = plt.subplots(figsize=(7, 4), layout="constrained")
    right = left.twinx()
    epochs = range(1, len(losses) + 1)
    lines = left.plot(epochs, losses, color="tab:blue", label="training loss")
    lines += right.plot(epochs, accuracies, color="tab:orange", label="test accuracy")
    left.set(xlabel="epoch", ylabel="training loss", title="Handwritten digits", ylim=(0, None))
    right.set(ylabel="test accuracy", ylim=(None, 1))
    left.legend(handles=lines, loc="center right")
    figure.savefig(path, dpi=150)
    print(f"learning curve: {path}")


def main():
    with contextlib.ExitStack() as stack:
        # Under `zmqdist launch` the cluster is in the environment; alone, the program brings its own.
        cluster = None if "ZMQDIST_CONFIG" in os.environ else stack.enter_context(zd.local_cluster(workers=2))
        coordinator = stack.enter_context(contextlib.closing(zd.coordinator.ClusterCoordinator(cluster)))
        losses, accuracies = train(coordinator, Console())
    draw(losses, accuracies, "digits.png")
    print(f"test accuracy: {accuracies[-1]:.3f}")


if __name__ == "__main__":
    main()
