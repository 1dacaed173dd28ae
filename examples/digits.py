"""Train a network on handwritten digits: servers hold the weights, workers compute gradients.

    zmqdist launch configs/digits.yaml      on the cluster of this file
    python examples/digits.py [folder]      on two workers and two servers that it starts itself

The data service delivers each batch once, and any free worker runs `step` for it. Workers and
servers may die. With a folder for checkpoints, a later run goes on where one was stopped.
"""

import os
import sys
from contextlib import nullcontext
from itertools import islice
from tempfile import TemporaryDirectory

import network
import numpy as np
import plots

import zmqdist as zd

zd.coordinator.send_by_value(network)  # workers on other hosts may not have the file
EPOCHS, STEPS, BATCH, HIDDEN = 30, 15, 96, 64  # the last of the 15 batches is smaller
HALVES = zd.partitioners.FixedShardsPartitioner(2)  # of each weight, one at each server


def batches(images, labels, first):
    """The batches from epoch `first` on; the number of an epoch decides the order of its images."""

    def batch(step):
        epoch, at = divmod(int(step), STEPS)
        chosen = np.random.default_rng(epoch).permutation(len(labels))[at * BATCH :][:BATCH]
        return images[chosen], labels[chosen]

    spec = zd.TensorSpec((None, 64), np.uint8), zd.TensorSpec((None,), np.uint8)
    return zd.data.Dataset.range(first * STEPS, EPOCHS * STEPS).map(batch, output_signature=spec)


def step(strategy, weights, images, labels):
    """Runs on a worker: one message to each server for the weights, and one for the gradients."""
    loss, grads = network.gradients(strategy.read(weights), images, labels)
    strategy.apply(zd.optimizers.Momentum(0.05), zip(grads, weights, strict=True))
    return loss


def train(strategy, folder):
    """Return loss and test accuracy of each epoch, also of those before a restart."""
    rng, coordinator = np.random.default_rng(0), strategy.coordinator
    training, test = network.load(rng)
    with strategy.scope():
        weights = [zd.Variable(value) for value in network.initial(rng, HIDDEN)]
    run = zd.checkpoint.Checkpoint(weights=weights, curve=np.zeros((EPOCHS, 2)), epoch=0)
    manager = zd.checkpoint.CheckpointManager(run, folder)
    manager.restore_or_initialize() or manager.save(0)  # there is always one to go on from
    service = zd.data.service.distribute("distributed_epoch", coordinator, ordered=True)
    source = iter(batches(training[0], training[1], run.epoch).apply(service))
    with zd.checkpoint.Recovery(strategy, manager):
        while run.epoch < EPOCHS:
            some = islice(source, STEPS)
            losses = [coordinator.submit(step, strategy, weights, *batch) for batch in some]
            loss = np.mean(coordinator.gather(losses))
            run.curve[run.epoch] = loss, network.accuracy(strategy.read(weights), *test)
            hit, run.epoch = run.curve[run.epoch, 1], run.epoch + 1
            manager.save(run.epoch)
            print(f"epoch {run.epoch:2}/{EPOCHS}  loss {loss:.4f}  accuracy {hit:.3f}", flush=True)
    return run.curve


def main():
    own = None if "ZMQDIST_CONFIG" in os.environ else zd.local_cluster(workers=2, ps=2)
    strategy = zd.ParameterServerStrategy(own, HALVES, recovery_s=60)
    with own or nullcontext(), strategy, TemporaryDirectory() as folder:
        curve = train(strategy, sys.argv[1] if sys.argv[1:] else folder)
    plots.curves("digits.png", "Digits", "epoch", "test accuracy", [curve[:, 1]])
    print(f"test accuracy: {curve[-1, 1]:.3f}")


if __name__ == "__main__":
    main()
