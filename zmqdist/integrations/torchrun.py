"""What `torchrun` gives to the processes of a PyTorch training, from a cluster. It needs the package
torch.

>>> from zmqdist.integrations import torchrun
>>> def train():
...     import torch.distributed as dist
...     dist.init_process_group("gloo")
...     return dist.get_rank(), dist.get_world_size()
>>> torchrun.run(train, processes=2, target=cluster)
[(0, 2), (1, 2)]
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final

from zmqdist import errors

try:
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]
except ImportError as error:
    raise ImportError(errors.needs("zmqdist.integrations.torchrun", "torch")) from error

from zmqdist.addresses import split_address
from zmqdist.scheduling.coordinator.coordinator import independent_coordinator
from zmqdist.tasks.current_actor import current_actor
from zmqdist.tasks.server import Server

CAUSE_S: Final = 2.0
"""Seconds after the first error of a member, in which the death that is its cause may be noticed."""

_store: TCPStore | None = None
"""The store of the latest rendezvous, in the process of rank 0."""


@contextlib.contextmanager
def rendezvous(task: Server | None = None, timeout: float = 60.0) -> Iterator[dict[str, str]]:
    """Set the environment variables of torchrun in this process while the with-statement runs, for
    `torch.distributed.init_process_group("gloo")` or "nccl".

    All tasks of the job, or all members of the group of actors, must enter it. They meet at a store
    of torch in the process of rank 0, at a free port. It serves until the process ends or the next
    rendezvous, because the others may need it for longer than rank 0.

    Args:
      task: the own task, whose place in its job is the rank; None for the member of a group of
        actors whose method calls this.
      timeout: seconds to wait for the others.

    Returns:
      The variables: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (among the processes of the
      same host), GROUP_RANK, GROUP_WORLD_SIZE (the number of the host), MASTER_ADDR, MASTER_PORT,
      and those that have torch use the store.

    Raises:
      DeadlineExceededError: not all have come.
      UnavailableError: another one has ended.
      FailedPreconditionError: this is no member of a group, and there is no task.
    """
    global _store
    task = current_actor().group if task is None else task
    job, rank = task.server_def.job_name, task.server_def.task_index
    master, _ = split_address(task.cluster_spec.task_address(job, 0))
    store = None
    if rank == 0:
        patience = timedelta(seconds=timeout)
        store = TCPStore(master, 0, is_master=True, wait_for_workers=False, timeout=patience)
    own = platform.node(), 0 if store is None else store.port
    everyone = task.all_gather_object(own, timeout=timeout)
    _store = store  # all have left the earlier one
    hosts = [host for host, _ in everyone]
    groups = list(dict.fromkeys(hosts))
    variables = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": hosts[:rank].count(hosts[rank]),
        "LOCAL_WORLD_SIZE": hosts.count(hosts[rank]),
        "GROUP_RANK": groups.index(hosts[rank]),
        "GROUP_WORLD_SIZE": len(groups),
        "MASTER_ADDR": master,
        "MASTER_PORT": everyone[0][1],
        "TORCHELASTIC_RUN_ID": f"{job}-{everyone[0][1]}",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    texts = {name: str(value) for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in texts}
    os.environ.update(texts)
    try:
        yield texts
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run(
    fn: Callable[..., Any],
    /,
    *args: Any,
    processes: int,
    target: Any = None,
    timeout: float = 60.0,
    **options: Any,
) -> list[Any]:
    """Call `fn(*args)` in so many processes of a cluster at a time, with torchrun's variables, and
    return the results by rank. The processes are a group of actors, which ends with this call.

    Args:
      target: the cluster or the address of its dispatcher; None for the cluster of the environment
        (`zmqdist launch`), or in a function for the one that runs it.
      timeout: seconds in which the processes must meet, as of `rendezvous`.
      options: options of actors, as `resources={"gpu": 1}`.

    Raises:
      ActorLostError: a process has died; the text has its rank and its last lines.
      Exception: what `fn` raised first. The other processes are ended.
    """
    coordinator = independent_coordinator(target)
    team = coordinator.options(**options).actors(_Member, processes)
    try:
        values = team.run(fn, args, timeout).values
        for value in coordinator.as_completed(values):
            error = value.exception()
            if error is None:
                continue
            if not isinstance(error, errors.ActorLostError):
                # another rank sees the end of its connection before the death is noticed
                coordinator.wait(values, timeout=CAUSE_S)
                for death in team.deaths:
                    error = values[death.rank].exception() or error
            raise error
        return [value.result() for value in values]
    finally:
        coordinator.kill(team)


class _Member:
    """A process of `run`."""

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> Any:
        with rendezvous(timeout=timeout):
            return fn(*args)
