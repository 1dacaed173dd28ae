"""Addresses for the tasks of a test: ports that stay free until their tasks listen there.

A port that was found free and released may be taken by another test before the server of this one listens. So each port stays bound by a
socket that never listens: the kernel gives it to no process that requests any free port, and a listener with SO_REUSEADDR, as ZeroMQ,
asyncio and http.server have it, may still bind it. The port is released when the dict that names it, and each runner made with that dict,
is garbage-collected.

Not prevented: a program that binds exactly this port, by number and with SO_REUSEADDR.
"""

from __future__ import annotations

import os
import socket
import weakref


class ReservedCluster(dict[str, list[str]]):
    """A dict of jobs to addresses that keeps their ports reserved while it is referenced. It equals a plain dict; a copy is plain."""

    __slots__ = ("__weakref__",)


def reserved(tasks: dict[str, int]) -> ReservedCluster:
    """Return a cluster with this number of tasks for each job. Jobs with 0 tasks are left out.

    Raises:
      ValueError: a number of tasks below 0.
      OSError: no ports are left, or no descriptors: a reserved port takes one.
    """
    for job, count in tasks.items():
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"a cluster has 0 or more tasks of {job}, not {count!r}")
    held: list[int] = []
    try:
        cluster = ReservedCluster(
            {job: [_reserve(held) for _ in range(count)] for job, count in tasks.items() if count}
        )
    except BaseException:
        _let_go(held)
        raise
    weakref.finalize(cluster, _let_go, held)
    return cluster


def create_cluster_spec(
    has_chief: bool = False, num_workers: int = 1, num_ps: int = 0, has_eval: bool = False
) -> dict[str, list[str]]:
    """Return a cluster on this machine. Its ports stay reserved while the dict, or a runner made with it, is referenced.

    Raises:
      ValueError: a number of tasks below 0.
      OSError: no ports are left, or no descriptors: a reserved port takes one.
    """
    return reserved(
        {"chief": int(has_chief), "worker": num_workers, "ps": num_ps, "evaluator": int(has_eval)},
    )


def _reserve(held: list[int]) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        held.append(os.dup(free.fileno()))
        return f"localhost:{free.getsockname()[1]}"


def _let_go(held: list[int]) -> None:
    while held:
        os.close(held.pop())
