"""At which share of open sites does water find a way through a grid? A scan, as a job of Slurm.

    zmqdist launch examples/slurm.yaml               on a host that has sbatch
    zmqdist launch examples/slurm.yaml --on local    the same on this host, to try it first

The program does not say where its workers are: the cluster of the job is in its environment.
"""

import socket
from functools import partial

import numpy as np

import zmqdist as zd

SIDE, GRIDS = 64, 50


def flows(share, seed):
    """Whether a random grid has a way from its first row to its last one."""
    free = np.random.default_rng(seed).random((SIDE, SIDE)) < share
    wet = np.zeros_like(free)
    wet[0] = free[0]
    while True:
        spread = wet.copy()
        spread[1:] |= wet[:-1]
        spread[:-1] |= wet[1:]
        spread[:, 1:] |= wet[:, :-1]
        spread[:, :-1] |= wet[:, 1:]
        spread &= free
        if (spread == wet).all():
            return bool(wet[-1].any())
        wet = spread


def main():
    with zd.ClusterCoordinator() as coordinator:
        hosts = coordinator.run(socket.gethostname)
        print(f"{len(hosts)} workers on {len(set(hosts.values()))} hosts")
        shares = np.arange(0.54, 0.66, 0.02)
        results = {share: coordinator.map(partial(flows, share), range(GRIDS)) for share in shares}
        for share, values in results.items():
            mean = np.mean(coordinator.gather(values))
            print(f"open {share:.2f}: {mean:4.0%} {'#' * round(40 * mean)}", flush=True)


if __name__ == "__main__":
    main()
