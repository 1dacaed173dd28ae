"""`zmqdist status [TARGET]` and `zmqdist top [TARGET]`: show the status of a dispatcher, once or live
on a terminal. If the output of `top` is not a terminal, it prints the status once."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any, Final

import click

from zmqdist.errors import needs
from zmqdist.launch.connection import DispatcherClient
from zmqdist_cli.common import interval_option, locate, target_options

SCREEN: Final = "'zmqdist[top]'"
"""The package with the extra of the live screen."""


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
    with DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher:
        _print(dispatcher.call("facts"), as_json=as_json)


def _print(record: dict[str, Any], *, as_json: bool) -> None:
    from zmqdist.observe.status import checked, lines

    click.echo(json.dumps(record, indent=2) if as_json else "\n".join(lines(checked(record))))


@click.command(short_help="Show the workers, queues and lost workers of a dispatcher, live.")
@click.argument("target", required=False)
@interval_option("Time between two updates.")
@click.option("--json", "as_json", is_flag=True, help="Print one record as JSON and end.")
@target_options
def top(
    target: str | None,
    *,
    interval_s: float,
    as_json: bool,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Show live the workers, slots, functions, waiting work, failures and losses of the dispatcher
    TARGET; q or Ctrl-C ends the command.

    \b
    1 to 9, v   views             /        filter
    s, r        sort, reverse     Enter    a whole row, with its traceback

    The command continues when the dispatcher is restarted. If the output is not a terminal, or
    textual is not installed (pip install 'zmqdist[top]'), the command prints the status once.
    """
    with DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher:
        is_live = not as_json and sys.stdout.isatty()
        if is_live and importlib.util.find_spec("textual") is None:
            click.echo(f"{needs('the live screen', SCREEN)}; this is the status once:\n", err=True)
            is_live = False
        if not is_live:
            _print(dispatcher.call("facts"), as_json=as_json)
            return
        from zmqdist_cli.top_screen import TopScreen

        TopScreen(dispatcher.call, interval_s).run()
