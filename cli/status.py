"""`zmqdist status [TARGET]`: print the status of a dispatcher once."""

from __future__ import annotations

import json
from typing import Any

import click

from zmqdist.launch.connection import DispatcherClient
from zmqdist_cli.common import place, target_options


@click.command(short_help="Show the workers, queues and lost workers of a dispatcher, once.")
@click.argument("target", required=False)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the status as JSON; durations are in seconds."
)
@target_options
def status(target: str | None, *, as_json: bool, timeout_s: float, **secrets: Any) -> None:
    """Show once the workers and queues of the dispatcher TARGET, and the workers and slot processes
    that were lost.

    TARGET is the host:port of a dispatcher, or the cluster file that `zmqdist launch` runs on this
    host. You may leave it out if the environment variable ZMQDIST_CONFIG names a running cluster.
    """
    with DispatcherClient(*place(target, **secrets), "client", timeout_s) as dispatcher:
        show(dispatcher.call("status"), as_json=as_json)


def show(record: dict[str, Any], *, as_json: bool) -> None:
    """Print a status record as text or as JSON."""
    from zmqdist.observe.status import checked, lines

    click.echo(json.dumps(record, indent=2) if as_json else "\n".join(lines(checked(record))))
