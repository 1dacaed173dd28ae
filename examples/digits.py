"""Train a small network on handwritten digits. Parameter servers hold the weights, and workers compute the gradients.

    zmqdist launch configs/digits.yaml      on the cluster of this file
    python examples/digits.py [folder]      on two workers and two parameter servers that the program starts itself

The data service delivers each batch once. For each batch the program schedules one function, which runs on any free worker. The function
reads the weights, computes a gradient, and has the servers make a step with the gradient. Other workers process other batches meanwhile.

If a worker dies, another worker computes its batch again. If a parameter server dies and is restarted, its weights are restored from the
checkpoint of the last epoch. With a folder for checkpoints, a later run continues where an earlier run was stopped.
"""

import contextlib
import itertools
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import zmqdist as zd

EPOCHS, BATCH, HIDDEN = 30, 96, 64
STEPS = 15  # of an epoch: its last batch is smaller
OPTIMIZER = zd.optimizers.Momentum(0.1)
TRAINING = 1_437  # of 1,797 images; the other 360 are the test
RECOVERY_S = 60.0  # how long a step waits for a parameter server that died


def load(rng):
    """Training and test set, each (n, 64) pixels of 0 to 16 and (n,) digits, uint8."""
    rows = np.loadtxt(Path(__file__).parent / "data" / "digits.csv.gz", delimiter=",", dtype=np.uint8)
    rows = rng.permutation(rows)
    return (rows[:TRAINING, :64], rows[:TRAINING, 64]), (rows[TRAINING:, :64], rows[TRAINING:, 64])


def batches(images, labels, first):
    """The batches from epoch `first` on: each epoch has the images in an order of its own, which its number decides."""

    def batch(step):
        number, at = divmod(int(step), STEPS)
        order = np.random.default_rng(number).permutation(len(labels))[at * BATCH : (at + 1) * BATCH]
        return images[order], labels[order]

    spec = zd.TensorSpec((None, 64), np.uint8), zd.TensorSpec((None,), np.uint8)
    return zd.data.Dataset.range(first * STEPS, EPOCHS * STEPS).map(batch, output_signature=spec)


def forward(weights, images):
    """Hidden layer and logits."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(images / np.float32(16) @ w1 + b1, 0)
    return hidden, hidden @ w2 + b2


def gradients(weights, images, labels):
    """The loss of a batch and its gradient by each weight, both as a mean over the images."""
    hidden, logits = forward(weights, images)
    logits = logits - logits.max(axis=1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    picked = np.arange(len(labels)), labels
    loss = -np.log(chances[picked]).mean()
    chances[picked] -= 1
    chances /= len(labels)
    below = (chances @ weights[2].T) * (hidden > 0)
    return loss, [images.T / np.float32(16) @ below, below.sum(axis=0), hidden.T @ chances, chances.sum(axis=0)]


def accuracy(weights, images, labels):
    return float((forward(weights, images)[1].argmax(axis=1) == labels).mean())


def step(strategy, weights, images, labels):
    """Runs on a worker: one message to each parameter server for the weights, and one for the gradients."""
    loss, grads = gradients(strategy.read(weights), images, labels)
    strategy.apply(OPTIMIZER, zip(grads, weights, strict=True))
    return loss


def train(strategy, folder, console):
    """Returns the losses and test accuracies, one of each per epoch, those before a restart included."""
    rng = np.random.default_rng(0)
    (images, labels), test = load(rng)
    sizes = [(64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,)]
    with strategy.scope():
        scales = [(2 / size[0]) ** 0.5 * (len(size) > 1) for size in sizes]  # offsets begin with zeros
        weights = [zd.Variable(rng.normal(0, *how), dtype="f4") for how in zip(scales, sizes, strict=True)]
    run = zd.checkpoint.Checkpoint(weights=weights, curve=np.zeros((EPOCHS, 2)), epoch=0)
    manager = zd.checkpoint.CheckpointManager(run, folder)
    if manager.restore_or_initialize() is None:
        manager.save(0)  # whatever happens, there is one to go on from
    coordinator = strategy.coordinator
    service = zd.data.service.distribute("distributed_epoch", coordinator, ordered=True)
    source = iter(batches(images, labels, run.epoch).apply(service))
    columns = TextColumn("epoch"), BarColumn(), TextColumn("{task.completed}/{task.total}  {task.description}")
    with (
        zd.checkpoint.Recovery(strategy, manager),
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=EPOCHS, completed=run.epoch)
        while run.epoch < EPOCHS:
            some = itertools.islice(source, STEPS)
            losses = [coordinator.schedule(step, args=(strategy, weights, *batch)) for batch in some]
            loss = float(np.mean(coordinator.fetch(losses)))
            run.curve[run.epoch] = loss, accuracy(strategy.read(weights), *test)
            run.epoch += 1
            manager.save(run.epoch)
            told = f"loss {loss:.4f}  accuracy {run.curve[run.epoch - 1, 1]:.3f}"
            progress.update(bar, advance=1, description=told)
            if not console.is_terminal:
                print(f"epoch {run.epoch:2}/{EPOCHS}  {told}", flush=True)
    return run.curve.T


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
        folder = sys.argv[1] if len(sys.argv) > 1 else stack.enter_context(tempfile.TemporaryDirectory())
        # Under `zmqdist launch` the cluster is in the environment; alone, the program brings its own.
        cluster = None if "ZMQDIST_CONFIG" in os.environ else stack.enter_context(zd.local_cluster(workers=2, ps=2))
        halves = zd.partitioners.FixedShardsPartitioner(2)
        strategy = stack.enter_context(zd.ParameterServerStrategy(cluster, halves, recovery_s=RECOVERY_S))
        losses, accuracies = train(strategy, folder, Console())
    draw(losses, accuracies, "digits.png")
    print(f"test accuracy: {accuracies[-1]:.3f}")


if __name__ == "__main__":
    main()
