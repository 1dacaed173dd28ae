"""Checks of each address of a cluster, and checks whether the tasks of the cluster reach each
other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final, TypeVar

from zmqdist import errors
from zmqdist.cluster.config import ClusterConfig
from zmqdist.cluster.file_sections import WorkerJob
from zmqdist.cluster.spec import ClusterSpec
from zmqdist.observe.doctor.findings import Finding, ok, problem
from zmqdist.observe.doctor.host import DESCRIPTORS_MIN
from zmqdist.observe.doctor.network import client_of, examine_planned, examine_server
from zmqdist.observe.status import plural
from zmqdist.scheduling.worker.slots import OTHER_FDS, SLOT_FDS
from zmqdist.tasks.control_methods import REACH
from zmqdist.transport.credentials import Credentials

T = TypeVar("T")

AT_A_TIME: Final = 16
TASK: Final = "server-"
"""The text before the name of the task in the `kind` that the server of a task reports."""

CHILD_FDS: Final = 5
"""Number of file descriptors that a launcher needs for each worker that it starts: two pipes, a
pidfd, a connection, and a spare one."""


def descriptors_needed(config: ClusterConfig) -> int:
    """Return the number of file descriptors that the most demanding process of a cluster needs,
    which is the launcher or a worker."""
    workers = config.jobs.worker or WorkerJob(count=1)
    starting = len(workers.indices()) * CHILD_FDS + OTHER_FDS
    return max(DESCRIPTORS_MIN, starting, workers.slots_here() * SLOT_FDS + OTHER_FDS)


def credentials_for(config: ClusterConfig, explicit: Credentials) -> Credentials:
    """Return the credentials that the user has given, or else those of the cluster file."""
    if explicit != Credentials():
        return explicit
    if config.runtime is not None:
        return Credentials(config.runtime.token_file, config.runtime.keys_dir)
    return Credentials(keys_dir=config.security.keys)


def examine_config(config: ClusterConfig, explicit: Credentials, timeout_s: float) -> list[Finding]:
    """Check the addresses of a cluster file, whether or not the cluster runs."""
    credentials = credentials_for(config, explicit)
    findings = [
        ok(job, f"{plural(len(section.indices()), 'task')}; the launcher chooses their addresses")
        for job, section in config.jobs.task_jobs().items()
        if section.tasks is None
    ]
    if config.runtime is not None:
        address = config.runtime.dispatcher.removeprefix("zmq://")
        findings += examine_server(
            address, credentials, timeout_s, subject=f"dispatcher {address}"
        ).findings
    return findings + examine_tasks(
        config.spec,
        credentials,
        timeout_s,
        excluded_jobs=() if config.runtime is None else ("dispatcher",),
    )


def examine_tasks(
    spec: ClusterSpec,
    credentials: Credentials,
    timeout_s: float,
    *,
    excluded_jobs: Collection[str] = (),
) -> list[Finding]:
    """Check the addresses of a cluster's tasks, and whether the running tasks reach each other.
    Tasks of `excluded_jobs` are left out."""
    addresses = {
        f"{job}:{index}": spec.task_address(job, index)
        for job in spec.jobs
        if job not in excluded_jobs
        for index in spec.task_indices(job)
    }
    examined = _concurrently(
        lambda name: examine_planned(
            addresses[name], credentials, timeout_s, subject=f"{name} {addresses[name]}"
        ),
        addresses,
    )
    tasks = []
    for name, address in examined.items():
        kind = "" if address.info is None else address.info.kind
        if kind == f"{TASK}{name}":
            tasks.append(name)
        elif kind.startswith(TASK):
            address.findings.append(
                problem(
                    f"{name} {addresses[name]}",
                    f"the task that listens there is {kind.removeprefix(TASK)}, of this "
                    f"cluster or of another",
                    "stop it, or give each task an address of its own; all tasks must be "
                    "started with the same addresses",
                )
            )
    reachability = _concurrently(
        lambda name: _examine_reach(name, addresses[name], credentials, timeout_s), tasks
    )
    findings = [address.findings for address in examined.values()]
    return list(chain(*findings, *reachability.values()))


def examine_addresses(
    addresses: Iterable[str], credentials: Credentials, timeout_s: float
) -> list[Finding]:
    """Check addresses at which servers should be running now."""
    examined = _concurrently(
        lambda address: examine_server(address, credentials, timeout_s), addresses
    )
    return [finding for address in examined.values() for finding in address.findings]


def _concurrently(fn: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
    names = list(dict.fromkeys(names))
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="zmqdist-doctor") as pool:
        return dict(zip(names, pool.map(fn, names), strict=True))


def _examine_reach(
    name: str, address: str, credentials: Credentials, timeout_s: float
) -> list[Finding]:
    """Have a running task try to reach the other tasks. Return findings that say which tasks it
    reaches, and which it cannot reach."""
    subject = f"from {name}"
    try:
        with client_of(address, credentials) as client:
            reply = client.call(REACH, [timeout_s], timeout_in_ms=round(3000 * timeout_s))
            entries = iter(reply.get_value() or [])
    except errors.OpError as error:
        return [
            problem(
                subject,
                f"it could not say which tasks it reaches ({error.message})",
                f"try again when it is less busy, or see the log of {name}",
            )
        ]
    rows = list(zip(entries, entries, entries, strict=False))
    reached = [str(task) for task, _, trouble in rows if not trouble]
    findings = [ok(subject, f"reaches {', '.join(reached)}")] if reached else []
    return findings + [
        problem(
            subject,
            f"it cannot reach {task} at {task_address} ({trouble})",
            f"run zmqdist doctor {task_address} on the host of {name}; both hosts must "
            f"resolve that address alike",
        )
        for task, task_address, trouble in rows
        if trouble
    ]
