"""`zmqdist dispatcher`, `zmqdist worker` and `zmqdist server`: run one role in the foreground, until
Ctrl-C, SIGTERM or `zmqdist shutdown`.

An option of the command line overrides the same setting of the cluster file (--config).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zmqdist import limits
from zmqdist.files import read_regular
from zmqdist_cli.common import (
    Seconds,
    advertise_option,
    grace_option,
    locate,
    ports_option,
    secret_options,
    ticket_options,
)

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig, ClusterSpec

PORT: Final = 5050
HOST: Final = "127.0.0.1"

_port = click.IntRange(0, 65535)
_config = click.option(
    "--config",
    "file",
    metavar="FILE",
    help="Cluster file; options of the command line override its settings.",
)
_grace = grace_option("Time for running functions to end after Ctrl-C or SIGTERM.")


class Slots(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.4
    """A type of option: a number of slots, or "auto", which means one slot for each core that this
    process may use."""

    name = "slots"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "auto":
            return "auto"
        return click.IntRange(1, limits.SLOTS_MAX).convert(value, param, ctx)


class ResourceAmount(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic since click 8.4
    """A type of option: the name and the amount of a resource, as `gpu=2` or `gpu=auto`."""

    name = "resource"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float | str]:
        name, _, amount = value.partition("=")
        try:
            return name, amount if (name, amount) == ("gpu", "auto") else float(amount)
        except ValueError:
            self.fail(f"{value!r} is no resource: write NAME=N, as gpu=2", param, ctx)


Row = tuple[str, str, Any, str, str]
"""An option: its name, the field of the config, its type, its metavar and its help."""

_MS = click.IntRange(0)
_DISPATCHER_ROWS: Final[tuple[Row, ...]] = (
    (
        "--job-gc-timeout",
        "job_gc_timeout_ms",
        click.IntRange(-1),
        "MS",
        "Milliseconds after which a job of the data service without readers is dropped; -1: never.",
    ),
    (
        "--job-gc-check-interval",
        "job_gc_check_interval_ms",
        _MS,
        "MS",
        "Milliseconds between two looks for such jobs.",
    ),
    (
        "--worker-timeout",
        "worker_timeout_ms",
        _MS,
        "MS",
        "Milliseconds after which the data service gives up a worker that is away.",
    ),
    (
        "--client-timeout",
        "client_timeout_ms",
        _MS,
        "MS",
        "Milliseconds after which the data service drops a reader that is silent.",
    ),
    (
        "--deployment-mode",
        "deployment_mode",
        click.Choice(("COLOCATED", "REMOTE", "HYBRID"), case_sensitive=False),
        "MODE",
        "COLOCATED: readers of the data service use the workers of their own process.",
    ),
)
_WORKER_ROWS: Final[tuple[Row, ...]] = (
    (
        "--dispatcher-timeout",
        "dispatcher_timeout_ms",
        _MS,
        "MS",
        "Milliseconds that a data task waits for a dispatcher that does not reply.",
    ),
    (
        "--cross-trainer-cache-size",
        "cross_trainer_cache_size_bytes",
        _MS,
        "BYTES",
        "Elements that trainings with a cross_trainer_cache share.",
    ),
    (
        "--snapshot-max-chunk-size",
        "snapshot_max_chunk_size_bytes",
        _MS,
        "BYTES",
        "Bytes, before compression, at which a file of a distributed snapshot ends.",
    ),
    (
        "--start-delay",
        "schedule_start_delay_s",
        Seconds(zero=True),
        "SECONDS",
        "Delay the first function of each program by the worker's index times this time.",
    ),
    (
        "--start-delay-max",
        "schedule_start_delay_max_s",
        Seconds(zero=True),
        "SECONDS",
        "The longest such delay; 0: no bound.",
    ),
)


def _options(rows: tuple[Row, ...]) -> Callable[[Any], Any]:
    """Return a decorator that adds the options to a command. Their values are None by default."""

    def add(command: Any) -> Any:
        for name, field, kind, metavar, text in reversed(rows):
            command = click.option(name, field, type=kind, metavar=metavar, help=text)(command)
        return command

    return add


@click.command(short_help="Run a dispatcher in the foreground.")
@click.option(
    "--port", type=_port, metavar="PORT", help=f"TCP port; 0 takes a free one.  [default: {PORT}]"
)
@click.option(
    "--host",
    "--bind",
    "host",
    metavar="HOST",
    help=f"Address or interface (eth1) to bind.  [default: {HOST}]",
)
@advertise_option
@ports_option
@click.option(
    "--lease",
    "lease_s",
    type=Seconds(),
    metavar="SECONDS",
    help="Length of a lease. A worker without contact to the dispatcher ends its functions after "
    "at most half of the lease, unless they "
    "run in threads.",
)
@click.option(
    "--attempts",
    "attempts_max",
    type=click.IntRange(1),
    metavar="N",
    help="Run a function again if its process dies; after N deaths the function fails with "
    "WorkerLost.",
)
@click.option(
    "--work-dir",
    metavar="DIR",
    help="Folder for the keyring, and for the datasets and journal of the data service.",
)
@click.option(
    "--fault-tolerant",
    "fault_tolerant_mode",
    is_flag=True,
    default=None,
    help="Keep a journal in --work-dir, from which the data service of a restarted dispatcher "
    "continues.",
)
@_options(_DISPATCHER_ROWS)
@click.option(
    "--gc-dynamic-sharding-jobs",
    is_flag=True,
    default=None,
    help="Drop jobs without readers also if their sharding is DYNAMIC.",
)
@secret_options
@_config
@click.pass_context
def dispatcher(context: click.Context, /, file: str | None, **options: Any) -> None:
    """Run a dispatcher in the foreground.

    Workers register with the dispatcher (zmqdist worker --dispatcher HOST:PORT). Programs connect
    to it (ClusterCoordinator("HOST:PORT")) and schedule functions. To accept connections from other
    hosts the dispatcher needs keys (zmqdist keygen).
    """
    from zmqdist.launch.roles import run_dispatcher
    from zmqdist.scheduling.shared.config import DispatcherConfig

    own_options = {name: value for name, value in options.items() if value is not None}
    config = DispatcherConfig(
        **{
            "host": HOST,
            "port": PORT,
            **(_dispatcher_of(file, options) if file else {}),
            **own_options,
        }
    )

    def announce(line: str) -> None:
        click.echo(line)
        click.echo(f"  add a worker: zmqdist worker --dispatcher {line.rpartition('zmq://')[2]}")

    context.exit(run_dispatcher(config, announce=announce))


@click.command(short_help="Run a worker in the foreground.")
@click.option(
    "--dispatcher",
    "target",
    metavar="HOST:PORT",
    help="Address of the dispatcher; by default the address in the file of --config, or else in "
    "ZMQDIST_CONFIG.",
)
@click.option(
    "--slots",
    type=Slots(),
    metavar="N|auto",
    help="Number of functions that run at the same time.  [default: 1]",
)
@click.option(
    "--resource",
    "resources",
    type=ResourceAmount(),
    multiple=True,
    metavar="NAME=N",
    help="What functions may use of this worker, such as gpu=2 or memory_gb=64; gpu=auto takes the "
    "GPUs of this host. May be repeated.",
)
@click.option(
    "--memory-max",
    "memory_max_gb",
    type=click.FloatRange(0, min_open=True),
    metavar="GB",
    help="Memory that a function may use, without shared arrays; one that takes more is ended with "
    "an error.  [default: no bound]",
)
@click.option(
    "--threads",
    is_flag=True,
    help="Run functions in threads instead of processes; a running function then cannot be killed.",
)
@click.option(
    "--threads-per-slot",
    type=click.IntRange(1),
    metavar="N",
    help="Threads of BLAS and OpenMP in each slot.  [default: OMP_NUM_THREADS or a similar "
    "variable, else cores / slots]",
)
@click.option(
    "--job",
    default="worker",
    show_default=True,
    metavar="NAME",
    help="Job in the worker's name: worker in worker:1.",
)
@click.option(
    "--index",
    type=click.IntRange(0),
    metavar="N",
    help="Index in the worker's name: 1 in worker:1; by default the lowest free index.",
)
@click.option(
    "--host",
    "--bind",
    "host",
    metavar="HOST",
    help="Address or interface (eth1) at which other processes fetch the worker's large results.",
)
@advertise_option
@ports_option
@click.option(
    "--port",
    type=_port,
    default=0,
    metavar="PORT",
    help="TCP port at the address of --host; 0 takes a free port.",
)
@click.option(
    "--actors-max",
    type=click.IntRange(0, limits.HOSTED_ACTORS_MAX),
    metavar="N",
    help="Actors that the worker may have, which are processes beside its slots.  [default: "
    f"{limits.WORKER_ACTORS_MAX}]",
)
@click.option(
    "--nested-slots-max",
    type=click.IntRange(0, limits.SLOTS_MAX),
    metavar="N",
    help="Extra slots that the worker may start while functions wait for functions that they have "
    f"scheduled.  [default: {limits.NESTED_SLOTS_MAX}]",
)
@click.option(
    "--orphan-limit",
    "orphan_limit_s",
    type=Seconds(),
    metavar="SECONDS",
    help=f"End after this time without a connection to the dispatcher.  [default: "
    f"{limits.ORPHAN_LIMIT_S:g}]",
)
@click.option(
    "--tag",
    "worker_tags",
    multiple=True,
    metavar="TAG",
    help="Tag for the data service, such as COLOCATED. May be repeated.",
)
@_options(_WORKER_ROWS)
@ticket_options
@_grace
@secret_options
@_config
@click.pass_context
def worker(
    context: click.Context,
    /,
    target: str | None,
    *,
    slots: int | str | None,
    resources: tuple[tuple[str, float | str], ...],
    threads: bool,
    host: str | None,
    advertise: str | None,
    grace_s: float,
    file: str | None,
    token_file: str | None,
    keys_dir: str | None,
    insecure: bool,
    **options: Any,
) -> None:
    """Run a worker in the foreground.

    The worker waits for its dispatcher, and reconnects if the dispatcher was restarted. Functions
    run in slots. Unless --threads is given, each slot is a process of its own, so that a function
    that crashes stops no other function.
    """
    from zmqdist.addresses import advertised_address
    from zmqdist.cluster.file_sections import WorkerJob
    from zmqdist.launch.roles import run_worker
    from zmqdist.scheduling.shared.config import WorkerConfig

    section = WorkerJob()
    if file is not None:
        cluster = _loaded(file, keys_dir)
        section = cluster.jobs.worker or section
        os.environ.update(section.env)
        target = target or _dispatcher_address(cluster, file)
        keys_dir = keys_dir or cluster.security.keys
    address, credentials = locate(target, token_file, keys_dir, insecure, name="--dispatcher")
    advertise = advertise or section.advertise
    config = WorkerConfig(
        address,
        worker_address=None if advertise is None else advertised_address(advertise, "%port%"),
        host=host or section.host,
        slots=section.slots_here() if slots is None else WorkerJob(slots=slots).slots_here(),  # type: ignore[arg-type]
        resources={**section.resources, **dict(resources)},
        processes=not threads,
        token_file=credentials.token_file,
        keys_dir=credentials.keys_dir,
        insecure=credentials.insecure,
        **{
            **section.settings(),
            **{name: value for name, value in options.items() if value not in (None, ())},
        },
    )
    context.exit(run_worker(config, grace_s=grace_s, announce=click.echo))


def _loaded(file: str, keys_dir: str | None, *, runtime_allowed: bool = True) -> ClusterConfig:
    """Load the cluster file of a role, and have this process choose free ports from its range. A
    range from --ports or the environment wins.

    Raises click.UsageError if the file demands CURVE and no key folder is named, because a role
    must not use the token instead.
    """
    from zmqdist.addresses import VARIABLE
    from zmqdist.cluster import ClusterConfig

    # A role in a pod gets a file that `zmqdist launch --render` has written, and such a file has
    # the section `runtime`.
    config = ClusterConfig.load(file, runtime_allowed=runtime_allowed)
    security = config.security
    if security.curve is True and not (
        security.keys or keys_dir or os.environ.get("ZMQDIST_KEYS_DIR")
    ):
        raise click.UsageError(
            f"{Path(file).name} wants CURVE and names no keys: make keys (zmqdist keygen "
            f"DIR) and pass --keys DIR"
        )
    if config.ports is not None:
        os.environ.setdefault(VARIABLE, config.ports)
    return config


def _dispatcher_of(file: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of DispatcherConfig that a cluster file sets."""
    from zmqdist.cluster.file_sections import DispatcherJob, WorkerJob
    from zmqdist.transport.endpoint import split

    config = _loaded(file, options["keys_dir"])
    section = config.jobs.dispatcher or DispatcherJob()
    host, port = split(section.address)
    return {
        "host": host,
        "port": port,
        "cancel_grace_s": (config.jobs.worker or WorkerJob()).cancel_grace_s,
        "keys_dir": config.security.keys,
        **section.settings(),
    }


def _dispatcher_address(config: ClusterConfig, file: str) -> str:
    """Return the address at which workers reach the dispatcher of a cluster file. This is its
    `advertise`, or else its `address`.

    Raises click.UsageError if the port is 0, because only `zmqdist launch` knows the port in this
    case.
    """
    from zmqdist.addresses import advertised_address
    from zmqdist.transport.endpoint import split

    section = config.jobs.dispatcher
    address = "" if section is None else section.address
    if address and section is not None and section.advertise is not None:
        address = advertised_address(section.advertise, split(address)[1])
    if not address or address.endswith(":0"):
        raise click.UsageError(
            f"{Path(file).name} has no fixed port for the dispatcher: pass --dispatcher HOST:PORT"
        )
    return address


@click.command(short_help="Run one task of a cluster in the foreground.")
@click.argument("config", required=False)
@click.option(
    "--spec",
    metavar="JSON",
    help='In place of CONFIG: {"worker": ["host:port", ...], ...}, or @FILE to read such JSON '
    "from a file.",
)
@click.option(
    "--job",
    metavar="NAME",
    help="Job of this task; you may leave it out if the cluster has only one job.",
)
@click.option(
    "--index",
    type=click.IntRange(0),
    metavar="N",
    help="Index of this task; you may leave it out if its job has only one task.",
)
@click.option(
    "--host",
    "--bind",
    "bind_host",
    metavar="HOST",
    help="Address or interface (eth1) to listen on, in place of the task's address in the cluster.",
)
@ports_option
@grace_option("Time for running calls to end after Ctrl-C or SIGTERM.")
@ticket_options
@secret_options
@click.pass_context
def server(
    context: click.Context,
    /,
    config: str | None,
    *,
    spec: str | None,
    job: str | None,
    index: int | None,
    bind_host: str | None,
    grace_s: float,
    token_file: str | None,
    keys_dir: str | None,
    insecure: bool,
    ticket_file: str | None,
    ticket_fd: int | None,
) -> None:
    """Run one task of a cluster in the foreground: a zmqdist.Server as a process.

    CONFIG is a cluster file with the addresses of its tasks. Without CONFIG and --spec, the
    environment variable TF_CONFIG or ZMQDIST_CONFIG describes the cluster and names the task to
    run. If ZMQDIST_CONFIG is the path of a file, name the task by --job and --index.
    """
    from zmqdist.launch.roles import TaskConfig, run_server

    if config is not None and spec is not None:
        raise click.UsageError("CONFIG and --spec both describe the cluster: give one of them")
    options: dict[str, Any] = {}
    if config is not None:
        cluster, keys_dir, options = _of_file(config, job, keys_dir)
    elif spec is not None:
        cluster = _of_text(spec)
    else:
        cluster, job, index = _of_environment(job, index)
    tickets = ticket_file, ticket_fd
    task = TaskConfig(
        cluster.as_dict(), job, index, token_file, keys_dir, insecure, bind_host, *tickets, options
    )
    try:
        code = run_server(task, grace_s=grace_s, announce=click.echo)
    except ValueError as error:
        # the cluster has several jobs or tasks, so the user has to name one
        raise click.UsageError(f"{error} (--job NAME --index N)") from None
    context.exit(code)


def _of_file(
    path: str, job: str | None, keys_dir: str | None
) -> tuple[ClusterSpec, str | None, dict[str, Any]]:
    """Return the cluster of a cluster file, the folder of its keys, and the config of the server.
    The config says how many slots the task has as a worker.
    """
    config = _loaded(path, keys_dir, runtime_allowed=False)
    sections = config.jobs.task_jobs()
    if job in sections:
        os.environ.update(sections[job].env)
    cluster = config.task_spec
    if not cluster.jobs or (job in sections and job not in cluster.jobs):
        raise click.UsageError(
            f"{Path(path).name} has no addresses for its tasks: write `tasks: [host:port, ...]` "
            f"in place of `count`"
        )
    worker = config.jobs.worker
    options = {} if worker is None else {"slots": worker.slots_here()}
    return cluster, keys_dir or config.security.keys, options


def _of_text(text: str) -> ClusterSpec:
    from zmqdist.cluster.spec import ClusterSpec

    try:
        if text.startswith("@"):
            text = read_regular(text[1:]).decode()
        return ClusterSpec(json.loads(text))
    except OSError as error:
        raise click.UsageError(f"--spec: {text[1:]} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise click.UsageError(
            f'--spec: {error}; wanted {{"worker": ["host:port", ...]}}'
        ) from None


def _of_environment(job: str | None, index: int | None) -> tuple[ClusterSpec, Any, Any]:
    from zmqdist.cluster.resolvers.base import check_rpc_layer
    from zmqdist.resolvers import TFConfigClusterResolver

    try:
        resolver = TFConfigClusterResolver(job, index)
        check_rpc_layer(resolver)
        cluster = resolver.cluster_spec()
        job, index = resolver.task_type, resolver.task_id
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    if not cluster.jobs:
        raise click.UsageError(
            "which cluster? Give a CONFIG or --spec, or set TF_CONFIG or ZMQDIST_CONFIG"
        )
    return cluster, job, index
