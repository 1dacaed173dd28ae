"""`zmqdist stack`: what the processes of a worker do now."""

from __future__ import annotations

from typing import Any

import click

from zmqdist.launch.connection import DispatcherClient
from zmqdist.limits import ANSWER_S
from zmqdist_cli.common import locate, printable, target_and, target_options


@click.command(short_help="Show where the functions of a worker are in their code.")
@click.argument("words", nargs=-1, metavar="[TARGET] WORKER")
@target_options
def stack(words: tuple[str, ...], *, timeout_s: float, **secrets: Any) -> None:
    """Print the Python stacks of the slots, actors and data tasks of one WORKER, such as worker:0,
    also of those that hang in C code.

    TARGET is the host:port of a dispatcher, or the cluster file that `zmqdist launch` runs on this
    host. You may leave it out if the environment variable ZMQDIST_CONFIG names a running cluster.
    """
    target, worker = target_and(words, "WORKER", "worker:0")
    with DispatcherClient(*locate(target, **secrets), "client", timeout_s) as dispatcher:
        stacks = dispatcher.call("stack", worker, timeout_s=ANSWER_S + timeout_s)
    for process, text in stacks.items():
        click.echo(printable(f"{process}\n{text}\n", "\n"))
