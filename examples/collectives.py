"""Group digits by k-means, in four tasks that have a quarter of the images each.

    python examples/collectives.py

No task sees the images of another one. In each round they add up their sums with `all_reduce`, so
all have the same centres. Each task is a process with a server, as it would be on four hosts.
"""

import multiprocessing

import network
import numpy as np
import plots

import zmqdist as zd

TASKS, CENTRES, ROUNDS = 4, 10, 12


def run(cluster, index):
    """What each process does; returns the centres and the rounds' mean squared distances."""
    (images, _), _ = network.load(np.random.default_rng(0))
    mine = images[index::TASKS].astype("f4")
    distances = []
    with zd.Server(cluster, "worker", index) as server:
        centres = server.broadcast(mine[:CENTRES] if index == 0 else None, root=0)
        for _ in range(ROUNDS):
            squares = ((mine[:, None] - centres) ** 2).sum(axis=2)
            nearest = np.eye(CENTRES, dtype="f4")[squares.argmin(axis=1)]
            parts = {"sums": nearest.T @ mine, "counts": nearest.sum(axis=0)}
            parts["error"] = squares.min(axis=1).sum(keepdims=True)
            total = server.all_reduce(parts, "sum")  # waits for the other three
            centres = total["sums"] / np.maximum(total["counts"], 1)[:, None]
            distances.append(float(total["error"][0]) / len(images))
        server.all_gather_object(index)  # no server stops while another task needs it
    return centres, distances


def main():
    cluster = zd.testing.create_cluster_spec(num_workers=TASKS)  # free ports of this host
    with multiprocessing.get_context("spawn").Pool(TASKS) as pool:
        results = pool.starmap(run, [(cluster, index) for index in range(TASKS)], chunksize=1)
    centres, distances = results[0]
    assert all((other == centres).all() for other, _ in results), "the same bits in all tasks"
    print(f"{TASKS} tasks, {ROUNDS} rounds: distance {distances[0]:.1f} -> {distances[-1]:.1f}")
    plots.images("collectives.png", centres)


if __name__ == "__main__":
    main()
