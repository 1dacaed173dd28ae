"""`zmqdist dispatcher` and `zmqdist worker`: run one role in the foreground, until Ctrl-C, SIGTERM
or `zmqdist shutdown`.

An option of the command line overrides the same setting of the cluster file (--config).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from zmqdist import limits
from zmqdist_cli.common import (
    Seconds,
    advertise_option,
    check_keys,
    grace_option,
    place,
    ports_option,
    secret_options,
    ticket_options,
    use_ports_of,
)

if TYPE_CHECKING:
    from zmqdist.cluster import ClusterConfig

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

    given = {name: value for name, value in options.items() if value is not None}
    config = DispatcherConfig(
        **{"host": HOST, "port": PORT, **(_dispatcher_of(file, options) if file else {}), **given}
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
    "--orphan-limit",
    "orphan_limit_s",
    type=Seconds(),
    metavar="SECONDS",
    help=f"End after this time without a connection to the dispatcher.  [default: "
    f"{limits.ORPHAN_LIMIT_S:g}]",
)
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
    threads: bool,
    host: str | None,
    advertise: str | None,
    threads_per_slot: int | None,
    orphan_limit_s: float | None,
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
        cluster = _load(file)
        check_keys(cluster, file, keys_dir)
        section = cluster.jobs.worker or section
        os.environ.update(section.env)
        use_ports_of(cluster)
        target = target or _dispatcher_address(cluster, file)
        keys_dir = keys_dir or cluster.security.keys
    address, credentials = place(target, token_file, keys_dir, insecure, name="--dispatcher")
    advertise = advertise or section.advertise
    config = WorkerConfig(
        address,
        worker_address=None if advertise is None else advertised_address(advertise, "%port%"),
        host=host or section.host,
        slots=section.slots_here() if slots is None else WorkerJob(slots=slots).slots_here(),  # type: ignore[arg-type]
        processes=not threads,
        threads_per_slot=threads_per_slot or section.threads_per_slot,
        orphan_limit_s=orphan_limit_s or section.orphan_limit_s,
        token_file=credentials.token_file,
        keys_dir=credentials.keys_dir,
        insecure=credentials.insecure,
        **options,
    )
    context.exit(run_worker(config, grace_s=grace_s, announce=click.echo))


def _load(file: str) -> ClusterConfig:
    from zmqdist.cluster import ClusterConfig

    # A role in a pod gets a file that `zmqdist launch --render` has written, and such a file has
    # the section `runtime`.
    return ClusterConfig.load(file, runtime_allowed=True)


def _dispatcher_of(file: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of DispatcherConfig that a cluster file sets. Also have this process choose
    free ports as `use_ports_of` says."""
    from zmqdist.cluster.file_sections import DispatcherJob, WorkerJob
    from zmqdist.transport.endpoint import split

    config = _load(file)
    check_keys(config, file, options["keys_dir"])
    use_ports_of(config)
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
