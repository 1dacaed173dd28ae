"""A group of actors that train together: each step adds up the gradients of all members.

    python examples/team.py

If a member died, all members would begin again from the weights that the program has given.
"""

import network
import numpy as np

import zmqdist as zd

RATE, STEPS, MEMBERS = 0.5, 60, 2


class Trainer:
    """A member: all members have the same weights at each step."""

    def __init__(self, weights):
        self.training, self.test = network.load(np.random.default_rng(0))
        self.weights = weights
        self.rng = np.random.default_rng(zd.current_actor().rank)

    def steps(self, count):
        me = zd.current_actor()
        for _ in range(count):
            rows = self.rng.integers(0, len(self.training[1]), 32)
            _, gradients = network.gradients(
                self.weights, self.training[0][rows], self.training[1][rows]
            )
            total = me.group.all_reduce(gradients)
            for value, gradient in zip(self.weights, total, strict=True):
                value -= RATE * gradient / me.size
        return network.accuracy(self.weights, *self.test)


def main():
    with zd.local_cluster(workers=MEMBERS) as cluster, cluster.coordinator() as coordinator:
        weights = network.initial(np.random.default_rng(0), 32)
        team = coordinator.options(on_death="restart_all").actors(Trainer, MEMBERS, weights)
        print("accuracy of each:", [round(value, 3) for value in team.steps(STEPS).result()])
        print("and later:", [round(value, 3) for value in team.steps(STEPS).result()])


if __name__ == "__main__":
    main()
