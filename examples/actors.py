"""A parameter server and a pipeline, written as actors.

    python examples/actors.py

`Weights` is a parameter server: one object with the weights, to which workers push gradients while
they train. `Stage` is a link of a pipeline: each stage passes what it has made to the next, so that
all work at once.
"""

import network
import numpy as np

import zmqdist as zd

RATE, STEPS, WORKERS = 0.5, 120, 2


class Weights:
    """A parameter server of thirty lines: it is the only one who changes the weights."""

    def __init__(self, hidden):
        self.values = network.initial(np.random.default_rng(0), hidden)
        self.pushes = 0

    def pull(self):
        return self.values

    def push(self, gradients):
        self.pushes += 1
        for value, gradient in zip(self.values, gradients, strict=True):
            value -= RATE * gradient


def train(server, member):
    """Runs on a worker: pull, compute, push, and do not wait for the push."""
    images, labels = network.load(np.random.default_rng(0))[0]
    rng = np.random.default_rng(member)
    for _ in range(STEPS):
        rows = rng.integers(0, len(labels), 32)
        _, gradients = network.gradients(server.pull().result(), images[rows], labels[rows])
        push = server.push(gradients)
    push.result()


class Stage:
    """A link of a pipeline: it gives its result to the next stage and does not wait."""

    def __init__(self, number, following=None):
        self.number, self.following = number, following

    async def run(self, value):
        value = value * 10 + self.number
        return value if self.following is None else await self.following.run(value)


def main():
    with zd.local_cluster(workers=WORKERS) as cluster, cluster.coordinator() as coordinator:
        server = coordinator.actor(Weights, 32)
        coordinator.gather([coordinator.submit(train, server, n) for n in range(WORKERS)])
        test = network.load(np.random.default_rng(0))[1]
        accuracy = network.accuracy(server.pull().result(), *test)
        print(f"parameter server: accuracy {accuracy:.2f}")

        last = coordinator.actor(Stage, 3)
        first = coordinator.actor(Stage, 1, coordinator.actor(Stage, 2, last))
        print("pipeline:", coordinator.gather([first.run(number) for number in range(4)]))


if __name__ == "__main__":
    main()
