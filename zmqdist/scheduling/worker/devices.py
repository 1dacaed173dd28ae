"""The GPUs of a worker: which of the host's it takes, so that no other worker of the host has them.

A worker takes a GPU by binding an abstract Unix socket with the GPU's id in its name, which the
kernel frees when the process ends, however it ends. Workers of other users, or in other network
namespaces (containers), have other names: their CUDA_VISIBLE_DEVICES must be disjoint.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

from zmqdist.cluster.resolvers.devices import CUDA, gpus
from zmqdist.errors import ResourceExhaustedError
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.scheduling.shared.quantities import AUTO, GPU, Quantities, quantities


class TakenResources(NamedTuple):
    """What a worker has: quantities, the ids of its GPUs by number, and the sockets that take them,
    which stay open as long as the worker uses the GPUs."""

    quantities: Quantities
    gpus: list[str]
    sockets: list[socket.socket]


def take_resources(config: WorkerConfig) -> TakenResources:
    """Take the GPUs of a worker, and return what it has.

    Raises ResourceExhaustedError if this process may not use as many GPUs as the config says, or
    other workers of this host have taken them.
    """
    amounts = dict(config.resources or {})
    wanted = amounts.pop(GPU, 0)
    if not wanted:
        return TakenResources(quantities(amounts), [], [])  # type: ignore[arg-type]
    visible: Iterable[str] = gpus()
    if not visible and CUDA not in os.environ and wanted != AUTO:
        # Nothing lists the GPUs of this host, so believe the number.
        visible = map(str, itertools.count())
    taken: dict[str, socket.socket] = {}
    for gpu in visible:
        if len(taken) == wanted:
            break
        try:
            taken[gpu] = _taken(gpu)
        except OSError:
            pass  # another worker of this host has it
    if wanted != AUTO and len(taken) < float(wanted):
        for claim in taken.values():
            claim.close()
        raise ResourceExhaustedError(
            f"resources: gpu is {wanted}, but this worker may use {len(taken)}: "
            f"CUDA_VISIBLE_DEVICES or nvidia-smi list {len(list(gpus()))}, and other workers of this "
            f"host have taken the rest: use fewer, or start fewer workers"
        )
    if taken:
        amounts[GPU] = len(taken)
    return TakenResources(quantities(amounts), list(taken), list(taken.values()))  # type: ignore[arg-type]


def _taken(gpu: str) -> socket.socket:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0zmqdist-gpu-{os.getuid()}-{gpu}")
    except BaseException:
        claim.close()
        raise
    return claim
