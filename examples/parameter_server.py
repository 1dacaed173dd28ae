"""Fit a line with the model on a parameter server, while workers compute the gradients.

    python examples/parameter_server.py

No step waits for another: each reads the present values, and the server applies each gradient as it
arrives. A worker is killed meanwhile; with `once=True` each step counts once all the same.
"""

import numpy as np

import zmqdist as zd

TRUE = np.array([2.0, -3.0, 0.5])


def points(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 3))
    return x, x @ TRUE + rng.normal(0, 0.1, size=64)


def step(weights, count, seed):
    """Runs on a worker. A variable is used like an array; only its handle has travelled."""
    x, y = points(seed)
    error = x @ weights - y
    weights.apply(zd.optimizers.SGD(0.05), x.T @ error / len(y))
    count.assign_add(1)
    return float((error**2).mean())


def main():
    cluster = zd.local_cluster(workers=2, ps=1)
    with cluster, zd.ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            weights = zd.Variable(np.zeros(3), name="weights")
            count = zd.Variable(0, name="count")
        coordinator = strategy.coordinator
        calls = [(weights, count, seed) for seed in range(400)]
        losses = [coordinator.schedule(step, call, once=True) for call in calls]
        losses[100].result()
        cluster.kill_worker(1)  # kill -9
        losses = coordinator.gather(losses)
        print(f"{count.numpy()} steps; loss {losses[0]:.2f}, at last {np.mean(losses[-50:]):.3f}")
        print("weights", weights.numpy().round(1), "instead of", TRUE)


if __name__ == "__main__":
    main()
