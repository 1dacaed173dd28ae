"""What a dispatcher and a worker are told, checked once, here.

Fields of the data service have the names of tf.data service; their durations are milliseconds, and None and 0 stand for the default
where nothing else is said. All other durations are seconds.

Light to import: whoever starts processes needs these before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from zmqdist import errors, limits
from zmqdist.blas_threads import thread_variables
from zmqdist.scheduling.dispatcher.rules import BrokerRules
from zmqdist.transport.address import DTS_PORT

PROTOCOLS: Final = ("zmq", "tcp")
"""Names of the one protocol that there is."""

DEPLOYMENT_MODES: Final = ("COLOCATED", "REMOTE", "HYBRID")

NEVER: Final = -1

START_DELAY_ENV: Final = "ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY"
"""Whole seconds."""


@dataclass(frozen=True)
class DispatcherConfig(BrokerRules):
    """Where a dispatcher listens, what it keeps, and when it gives up.

    Attributes:
      port: 0 takes a free one.
      protocol: "zmq" or "tcp", which are the same; None for that.
      work_dir: folder of the registered datasets and of the journal; made when it is missing. None: in memory.
      fault_tolerant_mode: keep a journal in `work_dir`: a dispatcher that is started again there goes on where the last one was.
      worker_addresses: the fixed list of workers that shares by place (FILE, DATA, ...) need; None or empty: whoever comes.
      job_gc_check_interval_ms: how often is looked for clients and iterations to let go; default 10 minutes, 0 is 1 ms.
      job_gc_timeout_ms: an iteration without readers is dropped after so long; default 5 minutes, 0 is 1 ms, -1 never.
      worker_timeout_ms: a worker that has gone is given up after so long, and what waited for it ends; default 10 minutes.
      worker_max_concurrent_snapshots: streams of snapshots that one worker writes at a time; 0 is 3.
      client_timeout_ms: a reader that is silent is let go after so long; default 5 minutes.
      gc_dynamic_sharding_jobs: drop iterations of DYNAMIC jobs, too: who reads them again begins anew.
      deployment_mode: COLOCATED, REMOTE, HYBRID, None (REMOTE): told to readers.
      host: address or interface to bind; anything but loopback needs keys (SECURITY.md).
      advertise: "host" or "host:port" at which others are told to find it; None: where it is bound.
      lease_s: how long a worker that was lost from sight may go on running what it has.
      reconnect_grace_s: how long a worker whose connection ended has to come back.
      cancel_grace_s: how long a function that was told to end has, before its slot is cut off.
      attempts_max: lost starts after which a piece of work fails with WorkerLost.
      token_file, keys_dir: where the secrets are, if not in the usual place.
      insecure: neither token nor keys; everybody who reaches the port can run code. Warns at each start.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Sequence[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int = 0
    client_timeout_ms: int | None = None
    gc_dynamic_sharding_jobs: bool = False
    deployment_mode: str | None = None
    host: str = "127.0.0.1"
    advertise: str | None = None
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        _check_more_than_0(lease_s=self.lease_s, reconnect_grace_s=self.reconnect_grace_s)
        if not self.cancel_grace_s >= 0:
            raise _invalid(f"cancel_grace_s is {self.cancel_grace_s}, wants 0 s or more")
        if self.attempts_max < 1:
            raise _invalid(f"attempts_max is {self.attempts_max}, wants 1 or more")
        _check_port(self.port)
        _check_protocol(self.protocol)
        if self.fault_tolerant_mode and not self.work_dir:
            raise _invalid("Cannot enable fault tolerant mode without configuring a work dir")
        if isinstance(self.worker_addresses, str):
            raise _invalid(f"worker_addresses is {self.worker_addresses!r}, wants a list of addresses")
        _check_not_negative(
            job_gc_check_interval_ms=self.job_gc_check_interval_ms,
            job_gc_timeout_ms=None if self.job_gc_timeout_ms == NEVER else self.job_gc_timeout_ms,
            worker_timeout_ms=self.worker_timeout_ms,
            client_timeout_ms=self.client_timeout_ms,
            worker_max_concurrent_snapshots=self.worker_max_concurrent_snapshots,
        )
        if self.deployment_mode is not None and str(self.deployment_mode).upper() not in DEPLOYMENT_MODES:
            raise _invalid(f"deployment_mode is {self.deployment_mode!r}, wants one of {', '.join(DEPLOYMENT_MODES)}")

    # -- what the data service makes of it; seconds ------------------------------------------------------------------------

    @property
    def gc_check_s(self) -> float:
        return _seconds(self.job_gc_check_interval_ms, limits.GC_CHECK_S, zero=0.001)

    @property
    def gc_timeout_s(self) -> float:
        return (
            inf
            if self.job_gc_timeout_ms == NEVER
            else _seconds(self.job_gc_timeout_ms, limits.GC_TIMEOUT_S, zero=0.001)
        )

    @property
    def worker_timeout_s(self) -> float:
        return _seconds(self.worker_timeout_ms, limits.WORKER_TIMEOUT_S)

    @property
    def client_timeout_s(self) -> float:
        return _seconds(self.client_timeout_ms, limits.CLIENT_TIMEOUT_S)

    @property
    def snapshots_max(self) -> int:
        """Streams that one worker writes at a time."""
        return self.worker_max_concurrent_snapshots or limits.WORKER_SNAPSHOTS_MAX


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker is and whom it works for.

    Attributes:
      dispatcher_address: "host:port", with or without "zmq://".
      worker_address: where others are told that it is; "%port%" stands for its port. None: its host ("localhost" on loopback) and port.
      port: of its own server, from which elements and large results are fetched; 0 takes a free one.
      protocol: "zmq" or "tcp", which are the same; None for that.
      heartbeat_interval_ms: inert (docs/tensorflow.md): dispatcher and worker tell each other at once what is new.
      dispatcher_timeout_ms: a task waits so long for a dispatcher that does not answer; default 1 hour.
      data_transfer_protocol: "zmq" or "tcp": readers are sent to a second port for elements, so that a firewall or another network can tell
        them from the rest. None: elements come from the worker's own port.
      data_transfer_address: where readers are told that this port is; "%dts_port%" stands for it. None: as for `worker_address`.
      data_transfer_port: this port; 0 takes a free one. With `processes` each task has a free port of its own, and any other is refused.
      worker_tags: "COLOCATED": readers of other processes leave it alone, unless they ask for any worker.
      cross_trainer_cache_size_bytes: window of elements that trainers share, of each worker; default 10 GiB.
      snapshot_max_chunk_size_bytes: files of snapshots become about so large; default 6 GB.
      shutdown_quiet_period_ms: at most for so long after it has left its dispatcher a worker goes on answering what readers have asked
        already, and ends when that is done; what they ask then is refused with CANCELLED, after which they read from other workers.
      host: address or interface it binds; None takes loopback for a dispatcher on loopback, else the interface that leads to it.
      job, index: its name; index None takes the lowest that is free, which may be another after a restart of the dispatcher.
      slots: functions it runs at a time.
      schedule_start_delay_s: worker i lets the first function of each coordinator wait for i times this, at most for
        `schedule_start_delay_max_s` (0: no bound). None: ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY, and that with _MAX, of the
        worker's environment, or 0.
      processes: slots are child processes (can be cut off, may crash) instead of threads.
      threads_per_slot: threads of BLAS and OpenMP in each slot that is a process. None: the cores of the host, shared out among the slots
        of as many such workers as `workers_on_host` says, unless the environment has a variable for them (blas_threads.py).
      orphan_limit_s: it ends itself after so long without a dispatcher; by default it waits for one as long as it takes, as
        tf.data service has it. (The command and cluster files have a limit: their processes must not stay behind.)
      token_file, keys_dir: where its secret is, if not in the usual place (SECURITY.md).
      insecure: neither token nor keys: for a dispatcher that was started insecure.
    """

    dispatcher_address: str
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None
    worker_tags: Sequence[str] = ()
    data_transfer_port: int = 0
    cross_trainer_cache_size_bytes: int = 0
    snapshot_max_chunk_size_bytes: int = 0
    shutdown_quiet_period_ms: int = 0
    host: str | None = None
    job: str = "worker"
    index: int | None = None
    slots: int = 1
    processes: bool = False
    threads_per_slot: int | None = None
    workers_on_host: int = 1
    orphan_limit_s: float = inf
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False
    schedule_start_delay_s: float | None = None
    schedule_start_delay_max_s: float | None = None

    def __post_init__(self) -> None:
        if not self.dispatcher_address:
            raise _invalid("Must specify a `dispatcher_address`")
        if not 1 <= self.slots <= limits.SLOTS_MAX:
            raise _invalid(f"slots is {self.slots}, wants 1 to {limits.SLOTS_MAX}")
        if self.threads_per_slot is not None and self.threads_per_slot < 1:
            raise _invalid(f"threads_per_slot is {self.threads_per_slot}, wants 1 or more, or None")
        if self.index is not None and self.index < 0:
            raise _invalid(f"index is {self.index}, wants 0 or more, or None")
        _check_more_than_0(orphan_limit_s=self.orphan_limit_s)
        _check_port(self.port)
        _check_protocol(self.protocol)
        self._check_data_transfer()
        _check_not_negative(
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            dispatcher_timeout_ms=self.dispatcher_timeout_ms,
            cross_trainer_cache_size_bytes=self.cross_trainer_cache_size_bytes,
            snapshot_max_chunk_size_bytes=self.snapshot_max_chunk_size_bytes,
            shutdown_quiet_period_ms=self.shutdown_quiet_period_ms,
            schedule_start_delay_s=self.schedule_start_delay_s,
            schedule_start_delay_max_s=self.schedule_start_delay_max_s,
        )
        if isinstance(self.worker_tags, str):
            raise _invalid(f"worker_tags is {self.worker_tags!r}, wants a list of tags")
        object.__setattr__(self, "worker_tags", tuple(self.worker_tags or ()))  # a list is what JSON makes of them
        if "" in (self.worker_tags or ()):
            raise errors.FailedPreconditionError("Worker tags cannot be empty.")

    def _check_data_transfer(self) -> None:
        _check_port(self.data_transfer_port, "data_transfer_port")
        if self.data_transfer_protocol is None:
            for name in ("data_transfer_address", "data_transfer_port"):
                if getattr(self, name):
                    raise _invalid(f"{name} is of a second port for elements: give data_transfer_protocol='zmq', too")
        elif self.data_transfer_protocol not in PROTOCOLS:
            text = f"No data transfer server factory has been registered for protocol {self.data_transfer_protocol}."
            raise errors.NotFoundError(f"{text} The available types are: [ {' '.join(PROTOCOLS)} ]")
        if self.processes and self.data_transfer_port:
            raise _invalid("data_transfer_port goes with processes=False: each task's process has a port of its own")
        if self.processes and self.data_transfer_address and DTS_PORT not in self.data_transfer_address:
            raise _invalid(f"data_transfer_address wants {DTS_PORT} in it with processes=True: each task has its port")

    @property
    def start_delay(self) -> tuple[float, float]:
        """Seconds between the starts of two workers with neighbouring indices, and the most that one waits."""
        delay = _or_of_environment(self.schedule_start_delay_s, START_DELAY_ENV)
        return delay, _or_of_environment(self.schedule_start_delay_max_s, START_DELAY_ENV + "_MAX")

    def thread_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables that its slots need for their threads, on top of this environment."""
        return thread_variables(self.threads_per_slot, self.slots * self.workers_on_host, environment)

    # -- what the data service makes of it ----------------------------------------------------------------------------------

    @property
    def dispatcher_timeout_s(self) -> float:
        return _seconds(self.dispatcher_timeout_ms, limits.DISPATCHER_TIMEOUT_S)

    @property
    def cache_bytes(self) -> int:
        return self.cross_trainer_cache_size_bytes or limits.TRAINER_CACHE_BYTES

    @property
    def chunk_bytes_max(self) -> int:
        return self.snapshot_max_chunk_size_bytes or limits.SNAPSHOT_CHUNK_BYTES_MAX

    @property
    def quiet_s(self) -> float:
        return self.shutdown_quiet_period_ms / 1000

    def elements_at(self, bound: str) -> str:
        """Where readers are told to find the second port, when it is bound at "host:port"."""
        host, _, port = bound.rpartition(":")
        if self.data_transfer_address is not None:
            return self.data_transfer_address.replace(DTS_PORT, port)
        return f"localhost:{port}" if host == "127.0.0.1" else bound

    def advertised(self, bound: str) -> str:
        """Where others are told to find it, when its server is bound at "host:port"."""
        host, _, port = bound.rpartition(":")
        if self.worker_address is not None:
            return self.worker_address.replace("%port%", port)
        return f"localhost:{port}" if host == "127.0.0.1" else bound


def _or_of_environment(seconds: float | None, name: str) -> float:
    if seconds is not None:
        return seconds
    told = os.environ.get(name, "")
    return float(told) if told.isdigit() else 0.0


def _seconds(ms: int | None, default_s: float, *, zero: float | None = None) -> float:
    """`zero`: what 0 stands for; None: the default."""
    if ms is None or (ms == 0 and zero is None):
        return default_s
    return ms / 1000 or zero or 0.0


def _invalid(problem: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(problem)


def _check_more_than_0(**durations: float) -> None:
    for name, seconds in durations.items():
        if not seconds > 0:  # so that NaN is refused, too
            raise _invalid(f"{name} is {seconds}, wants more than 0 s")


def _check_not_negative(**figures: Any) -> None:
    for name, figure in figures.items():
        if figure is not None and not figure >= 0:
            raise _invalid(f"{name} is {figure}, wants 0 or more")


def _check_port(port: int, name: str = "port") -> None:
    if not 0 <= port <= 65535:
        raise _invalid(f"{name} is {port}, wants 0 to 65535")


def _check_protocol(protocol: str | None) -> None:
    if protocol is not None and protocol not in PROTOCOLS:
        raise errors.FailedPreconditionError(
            f"No credentials factory has been registered for protocol {protocol}. The available types are: "
            f"[ {' '.join(PROTOCOLS)} ]",
        )
