"""`zmqdist bench`: measure the speed of zmqdist on this host. Each figure is printed with its ratio
to the figure of a simpler program, which is measured in the same run.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from zmqdist.observe.bench import BenchPlan, Figure


@click.command(short_help="Compare the speed of zmqdist with bare pyzmq on this host.")
@click.option(
    "--peer",
    metavar="HOST:PORT",
    help="Measure only calls, to `zmqdist bench --serve` at this address.",
)
@click.option("--serve", metavar="HOST:PORT", help="Answer the calls of --peer, until Ctrl-C.")
@click.option(
    "--quick", is_flag=True, help="Measure less: this takes seconds instead of a minute or two."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(peer: str | None, serve: str | None, *, quick: bool, as_json: bool) -> None:
    """Compare the speed of zmqdist with bare pyzmq and a process pool on this host.

    The command starts a cluster of two worker processes and measures calls, scheduled functions and
    large results. It prints the figures of zmqdist and of the other technique, which are measured
    in turns, and their ratio. Figures of different runs cannot be compared.

    To measure calls between two hosts, start the command with --serve on one and with --peer on the
    other. --serve also opens a port for the comparison with bare pyzmq. This port needs no key: it
    returns every message to its sender, and sends up to 256 MiB to a sender that requests them.
    """
    from zmqdist.errors import InvalidArgumentError

    if serve is not None and (peer is not None or quick or as_json):
        raise click.UsageError("--serve takes no other option")
    if serve is not None:
        _serve(serve)
        return
    from zmqdist.observe import bench as measuring

    try:
        figures = _measured(peer, measuring.QUICK if quick else measuring.FULL)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    click.echo(
        measuring.as_json(figures) if as_json else "\n".join(measuring.table(figures).lines())
    )


def _measured(peer: str | None, plan: BenchPlan) -> list[Figure]:
    from zmqdist.observe import bench

    if peer is not None:
        return bench.measure_calls(peer.removeprefix("zmq://"), plan)
    from zmqdist.launch.local_cluster import local_cluster
    from zmqdist.observe.peer import peer_process

    with contextlib.ExitStack() as stack:
        local = stack.enter_context(peer_process())
        _note("calls")
        figures = bench.measure_calls(local, plan)
        cluster = stack.enter_context(local_cluster(workers=2))
        _note("tasks")
        figures += bench.measure_tasks(cluster, plan)
        figures += bench.measure_round_trip(cluster, local, plan)
        _note("large results")
        figures += bench.measure_results(cluster, local, plan)
    return figures


def _note(subject: str) -> None:
    """Print what the command measures now, if standard error is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"measuring {subject} ...", err=True)


def _serve(address: str) -> None:
    from zmqdist.observe.peer import serving

    end_event = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: end_event.set())
    with serving(address.removeprefix("zmq://")) as real:
        click.echo(f"benchmark peer at {real}: zmqdist bench --peer {real}")
        end_event.wait()
