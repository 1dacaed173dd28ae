"""The settings of a dispatcher and of a worker, checked when a config is made.

Settings of the data service have the names that they have in tf.data service. Their durations are
in milliseconds. None and 0 mean the default unless the description of the field says otherwise. All
other durations are in seconds.

This module imports little, because every process that starts other processes imports it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeVar

from zmqdist import errors, limits
from zmqdist.addresses import advertised_address, check_advertised
from zmqdist.blas_threads import thread_variables
from zmqdist.field_types import check_fields, checks_options
from zmqdist.scheduling.shared.broker_settings import BrokerSettings
from zmqdist.scheduling.shared.quantities import check_worker_amounts
from zmqdist.scheduling.shared.registrations import job_problem, text_problem
from zmqdist.transport.credentials import Credentials
from zmqdist.transport.endpoint import BOUND_PORT, DTS_PORT

C = TypeVar("C", "DispatcherConfig", "WorkerConfig")

PROTOCOLS: Final = ("zmq", "tcp")
"""The two names of the only protocol, ZeroMQ over TCP."""

DEPLOYMENT_MODES: Final = ("COLOCATED", "REMOTE", "HYBRID")

NEVER: Final = -1

START_DELAY_ENV: Final = "ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY"
"""The environment variable from which workers read the start delay, in whole seconds."""


@dataclass(frozen=True)
class DispatcherConfig(BrokerSettings):
    """The address of a dispatcher, the state that it keeps, and its time limits for workers and
    readers.

    >>> config = zd.data.service.DispatcherConfig(port=0, client_timeout_ms=60_000)
    >>> config.client_timeout_ms
    60000

    Attributes:
      port: the port to bind; 0 chooses a free port.
      protocol: "zmq" or "tcp", which mean the same; None means "zmq".
      work_dir: folder of the registered datasets and of the journal, created if it is missing. None
        keeps the datasets in memory.
      fault_tolerant_mode: whether to keep a journal in `work_dir`, so that a restarted dispatcher
        continues from it.
      worker_addresses: the fixed list of workers that static sharding (FILE, DATA, ...) needs. None
        or an empty list admits any workers.
      job_gc_check_interval_ms: how often the dispatcher looks for clients and iterations to drop;
        default 10 minutes. 0 means 1 ms.
      job_gc_timeout_ms: the time without readers after which an iteration is dropped; default 5
        minutes. 0 means 1 ms, -1 means never.
      worker_timeout_ms: the time after which the data service removes an absent worker, and ends
        requests that wait for it; default 10 minutes.
      worker_max_concurrent_snapshots: how many streams of snapshots one worker writes at a time; 0
        means 3.
      client_timeout_ms: the silence after which a reader is dropped; default 5 minutes.
      gc_dynamic_sharding_jobs: whether iterations with DYNAMIC sharding are dropped as well. A
        later reader begins such an iteration anew.
      deployment_mode: COLOCATED, REMOTE or HYBRID; None means REMOTE. Readers get the mode from the
        dispatcher.
      host: address or interface to bind. Any address but loopback needs keys (SECURITY.md).
      advertise: "host" or "host:port" at which other processes reach the dispatcher, for example
        behind NAT. None means the bound address.
      lease_s: the length of a lease. A worker without contact to the dispatcher ends its functions
        after at most half of it.
      reconnect_grace_s: how long a disconnected worker may stay away and keep its leases.
      cancel_grace_s: the default `cancel_grace_s` of coordinators that get the DispatchServer, not
        only its address, as their target.
      attempts_max: the number of lost starts after which a work item fails with WorkerLost.
      growth_limit_s: how long after the last worker has joined or was lost a function waits for a
        worker that has enough resources for it.
      token_file, keys_dir: the places of the secrets, if they are not in the default place.
      insecure: whether to use neither token nor keys, so that any process that reaches the port can
        run code. Logs a warning at each start.

    Raises:
      InvalidArgumentError: a value is out of range, or `fault_tolerant_mode` lacks a `work_dir`;
        the message names the field.
      FailedPreconditionError: `protocol` is not known.
    """

    port: int = 0
    protocol: str | None = None
    work_dir: str | None = None
    fault_tolerant_mode: bool = False
    worker_addresses: Sequence[str] | None = None
    job_gc_check_interval_ms: int | None = None
    job_gc_timeout_ms: int | None = None
    worker_timeout_ms: int | None = None
    worker_max_concurrent_snapshots: int | None = 0
    client_timeout_ms: int | None = None
    gc_dynamic_sharding_jobs: bool = False
    deployment_mode: str | None = None
    host: str = "127.0.0.1"
    advertise: str | None = None
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_more_than_0(lease_s=self.lease_s, reconnect_grace_s=self.reconnect_grace_s)
        if not self.cancel_grace_s >= 0:
            raise _invalid(f"cancel_grace_s is {self.cancel_grace_s}, wants 0 s or more")
        if not self.growth_limit_s >= 0:
            raise _invalid(f"growth_limit_s is {self.growth_limit_s}, wants 0 s or more")
        if self.attempts_max < 1:
            raise _invalid(f"attempts_max is {self.attempts_max}, wants 1 or more")
        _check_port(self.port)
        _check_protocol(self)
        if self.fault_tolerant_mode and not self.work_dir:
            raise _invalid("Cannot enable fault tolerant mode without configuring a work dir")
        _check_advertised("advertise", self.advertise)
        _check_not_negative(
            job_gc_check_interval_ms=self.job_gc_check_interval_ms,
            job_gc_timeout_ms=None if self.job_gc_timeout_ms == NEVER else self.job_gc_timeout_ms,
            worker_timeout_ms=self.worker_timeout_ms,
            client_timeout_ms=self.client_timeout_ms,
            worker_max_concurrent_snapshots=self.worker_max_concurrent_snapshots,
        )
        if (
            self.deployment_mode is not None
            and str(self.deployment_mode).upper() not in DEPLOYMENT_MODES
        ):
            raise _invalid(
                f"deployment_mode is {self.deployment_mode!r}, wants one of "
                f"{', '.join(DEPLOYMENT_MODES)}"
            )

    # -- the settings of the data service, in seconds ----------------------------------------------

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
        """How many streams of snapshots one worker writes at a time."""
        return self.worker_max_concurrent_snapshots or limits.WORKER_SNAPSHOTS_MAX


@dataclass(frozen=True)
class WorkerConfig:
    """The name of a worker, its dispatcher, its slots and its addresses.

    >>> zd.data.service.WorkerConfig("host1:5050", slots=4).slots
    4

    Attributes:
      dispatcher_address: "host:port", with or without "zmq://".
      worker_address: the address at which other processes reach the worker. The worker adds the
        bound port if the address has no port or has "%port%" as its port. None means the bound
        address, with "localhost" in place of 127.0.0.1.
      port: the port of the worker's own server, from which other processes fetch elements and large
        results; 0 chooses a free port.
      protocol: "zmq" or "tcp", which mean the same; None means "zmq".
      heartbeat_interval_ms: without effect (docs/tensorflow.md), because dispatcher and worker send
        each other changes at once.
      dispatcher_timeout_ms: how long a data task waits for a dispatcher that does not reply;
        default 1 hour.
      data_transfer_protocol: with "zmq" or "tcp", readers fetch elements from a second port, so
        that a firewall or a network can treat elements differently. With None, readers fetch
        elements from the worker's own port, or with `processes` from the port of each task.
      data_transfer_address: the address at which readers reach the second port; "%dts_port%" stands
        for the bound port, and is required with `processes`. None means the bound address, with
        "localhost" in place of 127.0.0.1.
      data_transfer_port: the second port; 0 chooses a free port. It must be 0 with `processes`,
        because each task then has its own port.
      worker_tags: a worker with the tag "COLOCATED" serves only the readers in its own process and
        those that accept any worker.
      cross_trainer_cache_size_bytes: size of the window of elements that the trainers of one data
        task share; default 10 GiB.
      snapshot_max_chunk_size_bytes: the number of bytes, before compression, at which a file of a
        snapshot ends; default 6 GB.
      shutdown_quiet_period_ms: how long, at most, a worker that has left its dispatcher goes on
        replying to requests that readers sent before it left. It refuses later requests with
        CANCELLED, and the readers continue with other workers.
      host: the address or interface to bind. None chooses loopback for a dispatcher on loopback,
        otherwise the interface that leads to the dispatcher.
      job, index: the worker's name. If `index` is None, the dispatcher chooses the lowest free
        index, and perhaps a new one after a reconnect.
      slots: how many functions the worker runs at a time.
      resources: what functions may use of this worker, as {"gpu": 2, "memory_gb": 64}; None means
        nothing (docs/resources.md). "gpu" may be "auto": the GPUs in CUDA_VISIBLE_DEVICES, or else
        those that nvidia-smi lists. It needs `processes`.
      schedule_start_delay_s: worker i delays the first function of each coordinator by i times this
        delay, but by no more than `schedule_start_delay_max_s` (0 means no bound). For a field that
        is None the worker reads ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY or
        ZMQDIST_COORDINATOR_SCHEDULE_START_DELAY_MAX. A variable that is missing or not a whole
        number means 0.
      memory_max_gb: the memory in GB (10**9 bytes) that each slot may use, without shared arrays.
        A function that takes more is ended with a ResourceExhaustedError. It needs `processes`.
      processes: whether slots are child processes, which can be killed and may crash, instead of
        threads.
      threads_per_slot: how many threads BLAS and OpenMP start in each slot that is a process. None
        leaves the number to their environment variables. If these variables are missing, the cores
        of the host are divided among the slots of `workers_on_host` workers (blas_threads.py).
      actors_max: how many actors the worker may have, which are processes beside the slots. A
        worker whose slots are threads has none.
      orphan_limit_s: the time without a dispatcher after which the worker ends itself. By default
        there is no limit, as in tf.data service. The command `zmqdist worker` and cluster files set
        a limit, so that they leave no process running.
      token_file, keys_dir: the places of the worker's secrets, if they are not in the default place
        (SECURITY.md).
      insecure: whether to use neither token nor keys, for a dispatcher that was started insecure.
      nested_slots_max: how many extra slots the worker may start while functions in its slots wait
        for results of functions that they have scheduled (docs/nested_work.md).
      echo: whether the worker copies what its functions write to its own standard output and
        error. Programs can follow it in any case (docs/watch.md).
      ticket_file, ticket_fd: the private file or the descriptor from which `zmqdist worker` and
        launched workers read a join ticket. The worker then makes a key of its own (SECURITY.md)
        and stores it in `keys_dir` or in a temporary folder. The worker gets the name in the
        ticket.

    Raises:
      InvalidArgumentError: a value is out of range, or does not go with another value; the message
        names the field.
      FailedPreconditionError: `protocol` is not known, or a tag is empty.
      NotFoundError: `data_transfer_protocol` is not known.
    """

    dispatcher_address: str = ""
    worker_address: str | None = None
    port: int = 0
    protocol: str | None = None
    heartbeat_interval_ms: int | None = None
    dispatcher_timeout_ms: int | None = None
    data_transfer_protocol: str | None = None
    data_transfer_address: str | None = None
    worker_tags: Sequence[str] | None = ()
    data_transfer_port: int = 0
    cross_trainer_cache_size_bytes: int | None = 0
    snapshot_max_chunk_size_bytes: int | None = 0
    shutdown_quiet_period_ms: int | None = 0
    host: str | None = None
    job: str = "worker"
    index: int | None = None
    slots: int = 1
    resources: Mapping[str, float | str] | None = None
    memory_max_gb: float | None = None
    processes: bool = False
    threads_per_slot: int | None = None
    workers_on_host: int = 1
    orphan_limit_s: float = inf
    token_file: str | None = None
    keys_dir: str | None = None
    insecure: bool = False
    schedule_start_delay_s: float | None = None
    schedule_start_delay_max_s: float | None = None
    ticket_file: str | None = None
    ticket_fd: int | None = None
    actors_max: int = limits.WORKER_ACTORS_MAX
    nested_slots_max: int = limits.NESTED_SLOTS_MAX
    echo: bool = True

    def __post_init__(self) -> None:
        if not self.dispatcher_address:
            raise _invalid("Must specify a `dispatcher_address`")
        check_fields(self)
        if not 1 <= self.slots <= limits.SLOTS_MAX:
            raise _invalid(f"slots is {self.slots}, wants 1 to {limits.SLOTS_MAX}")
        if not 0 <= self.nested_slots_max <= limits.SLOTS_MAX:
            raise _invalid(
                f"nested_slots_max is {self.nested_slots_max}, wants 0 to {limits.SLOTS_MAX}"
            )
        try:
            check_worker_amounts(self.resources, processes=self.processes)
        except (TypeError, ValueError) as error:
            raise _invalid(str(error)) from None
        if self.memory_max_gb is not None and not (self.processes and self.memory_max_gb > 0):
            raise _invalid(
                f"memory_max_gb is {self.memory_max_gb}, wants more than 0 GB, and processes=True, "
                f"because a thread cannot be ended"
            )
        if not 0 <= self.actors_max <= limits.HOSTED_ACTORS_MAX:
            most = limits.HOSTED_ACTORS_MAX
            raise _invalid(f"actors_max is {self.actors_max}, wants 0 to {most}")
        if self.threads_per_slot is not None and self.threads_per_slot < 1:
            raise _invalid(f"threads_per_slot is {self.threads_per_slot}, wants 1 or more, or None")
        if self.index is not None and not 0 <= self.index <= limits.WORKER_INDEX_MAX:
            raise _invalid(f"index is {self.index}, wants 0 to {limits.WORKER_INDEX_MAX}, or None")
        if problem := job_problem(self.job):
            raise _invalid(problem)
        _check_more_than_0(orphan_limit_s=self.orphan_limit_s)
        _check_port(self.port)
        _check_protocol(self)
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
        # In a config from JSON the tags are a list, so convert them to a tuple.
        tags = tuple(self.worker_tags or ())
        object.__setattr__(self, "worker_tags", tags)
        if "" in tags:
            raise errors.FailedPreconditionError("Worker tags cannot be empty.")
        if problem := "".join(text_problem("a tag", tag) for tag in tags):
            raise _invalid(problem)

    def _check_data_transfer(self) -> None:
        _check_port(self.data_transfer_port, "data_transfer_port")
        if self.data_transfer_protocol is None:
            for name in ("data_transfer_address", "data_transfer_port"):
                if getattr(self, name):
                    raise _invalid(
                        f"{name} configures the second port: set data_transfer_protocol='zmq' as "
                        f"well"
                    )
        elif self.data_transfer_protocol not in PROTOCOLS:
            text = f"No data transfer server factory has been registered for protocol {self.data_transfer_protocol}."
            raise errors.NotFoundError(
                f"{text} The available types are: [ {' '.join(PROTOCOLS)} ]; write "
                f'data_transfer_protocol="zmq"'
            )
        _check_advertised("worker_address", self.worker_address, BOUND_PORT)
        _check_advertised("data_transfer_address", self.data_transfer_address, DTS_PORT)
        if self.processes and self.data_transfer_port:
            raise _invalid(
                "data_transfer_port needs processes=False, because otherwise each task has a port "
                "of its own"
            )
        if (
            self.processes
            and self.data_transfer_address
            and DTS_PORT not in self.data_transfer_address
        ):
            raise _invalid(
                f"data_transfer_address needs {DTS_PORT} in it with processes=True, because each "
                f"task has a port of its own"
            )

    @property
    def start_delay(self) -> tuple[float, float]:
        """The start delay in seconds between workers with neighbouring indices (0 means none), and
        the longest delay (0 means no bound)."""
        delay = _or_of_environment(self.schedule_start_delay_s, START_DELAY_ENV)
        return delay, _or_of_environment(self.schedule_start_delay_max_s, START_DELAY_ENV + "_MAX")

    @property
    def credentials(self) -> Credentials:
        """The places of the worker's secrets. The worker's dispatcher vouches for the keys of other
        processes."""
        return Credentials(self.token_file, self.keys_dir, self.insecure).vouched_by(
            self.dispatcher_address
        )

    def thread_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables that bound the number of threads in each slot. The caller
        adds them to `environment`.

        >>> config = zd.data.service.WorkerConfig("host1:5050", slots=4, threads_per_slot=2)
        >>> config.thread_variables({})["OMP_NUM_THREADS"]
        '2'
        """
        return thread_variables(
            self.threads_per_slot, self.slots * self.workers_on_host, environment
        )

    # -- the settings of the data service ----------------------------------------------------------

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
        return (self.shutdown_quiet_period_ms or 0) / 1000

    def advertised(self, bound: str) -> str:
        """Return the address at which other processes reach the worker's server, which is bound at
        `bound` ("host:port").

        >>> config = zd.data.service.WorkerConfig("host1:5050", worker_address="host2:%port%")
        >>> config.advertised("0.0.0.0:7000")
        'host2:7000'
        """
        return reached_at(self.worker_address, BOUND_PORT, bound)


def reached_at(address: str | None, placeholder: str, bound: str) -> str:
    """Return the address at which other processes reach a server that is bound at `bound`: the
    given one, with the port in place of the placeholder, or one that fits `bound`."""
    host, _, port = bound.rpartition(":")
    if address is not None:
        return advertised_address(address.replace(placeholder, port), port)
    return f"localhost:{port}" if host == "127.0.0.1" else bound


for _kind in (DispatcherConfig, WorkerConfig):
    _kind.__init__ = checks_options(f"{_kind.__name__}()")(_kind.__init__)  # type: ignore[method-assign]


def _or_of_environment(seconds: float | None, name: str) -> float:
    if seconds is not None:
        return seconds
    text = os.environ.get(name, "")
    return float(text) if text.isdigit() else 0.0


def _seconds(ms: int | None, default_s: float, *, zero: float | None = None) -> float:
    """Convert milliseconds to seconds. `zero` is the result for 0 ms; if it is None, 0 ms means the
    default."""
    return default_s if ms is None or (ms == 0 and zero is None) else ms / 1000 or zero or 0.0


def _invalid(problem: str) -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError(problem)


def _check_advertised(name: str, address: str | None, placeholder: str = "") -> None:
    """Raise InvalidArgumentError if other processes cannot connect to an address, whose port may be
    a placeholder."""
    if address is None:
        return
    try:
        check_advertised(address.replace(placeholder, "1") if placeholder else address)
    except ValueError as error:
        raise _invalid(f"{name} is {address!r}: {error}") from None


def _check_more_than_0(**durations: float) -> None:
    for name, seconds in durations.items():
        if not seconds > 0:  # also refuses NaN
            raise _invalid(f"{name} is {seconds}, wants more than 0 s")


def _check_not_negative(**figures: Any) -> None:
    for name, figure in figures.items():
        if figure is not None and not figure >= 0:
            raise _invalid(f"{name} is {figure}, wants 0 or more")


def _check_port(port: int, name: str = "port") -> None:
    if not 0 <= port <= 65535:
        raise _invalid(f"{name} is {port}, wants 0 to 65535")


def _check_protocol(config: DispatcherConfig | WorkerConfig) -> None:
    if config.protocol is not None and config.protocol not in PROTOCOLS:
        raise errors.FailedPreconditionError(
            f"No credentials factory has been registered for protocol {config.protocol}. The "
            f"available types are: "
            f"[ {' '.join(PROTOCOLS)} ]; write {type(config).__name__}(protocol='zmq'), or leave "
            f"protocol out",
        )


def config_of(kind: type[C], config: C | None, fields: dict[str, Any]) -> C:
    """Return the config of a server that was made with a config, or with fields of it as keywords,
    as in TensorFlow 2.3.

    Raises:
      InvalidArgumentError: `config` is no config of this kind, or there are fields beside it.
      TypeError: `kind` has no such field.
    """
    if config is None:
        return kind(**fields)
    if not isinstance(config, kind) or fields:
        keywords = (
            "port=0" if kind is DispatcherConfig else "port=0, dispatcher_address='host:port'"
        )
        raise _invalid(
            f"config is {config!r}, wants a {kind.__name__}, or no config and keywords such as "
            f"{keywords}"
        )
    return config
