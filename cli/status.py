"""`zmqdist status [TARGET]` and `zmqdist top [TARGET]`: show the status of a dispatcher, once or live
on a terminal. If the output of `top` is not a terminal, it prints the status once."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from zmqdist import clock as time
from zmqdist.errors import OpError
from zmqdist.launch.connection import DispatcherClient
from zmqdist.launch.exit_codes import ExitCode
from zmqdist_cli.common import Seconds, locate, target_options


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
    with DispatcherClient(*locate(target, **secrets), "client", timeout_s) as dispatcher:
        _print(dispatcher.call("facts"), as_json=as_json)


def _print(record: dict[str, Any], *, as_json: bool) -> None:
    from zmqdist.observe.status import checked, lines

    click.echo(json.dumps(record, indent=2) if as_json else "\n".join(lines(checked(record))))


@click.command(short_help="Show the workers, queues and lost workers of a dispatcher, live.")
@click.argument("target", required=False)
@click.option(
    "--interval",
    "interval_s",
    type=Seconds(),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one record as JSON and end.")
@target_options
@click.pass_context
def top(
    context: click.Context,
    /,
    target: str | None,
    *,
    interval_s: float,
    as_json: bool,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Show live what `zmqdist status` shows of the dispatcher TARGET; q or Ctrl-C ends the command.

    The command continues when the dispatcher is restarted. If the output is not a terminal, the
    command prints the status once and ends.
    """
    with DispatcherClient(*locate(target, **secrets), "client", timeout_s) as dispatcher:
        if as_json or not sys.stdout.isatty():
            _print(dispatcher.call("facts"), as_json=as_json)
            return
        try:
            with _keys() as ends_within:
                _live(dispatcher, interval_s, ends_within)
        except KeyboardInterrupt:
            context.exit(int(ExitCode.OK))


def _live(
    dispatcher: DispatcherClient, interval_s: float, ends_within: Callable[[float], bool]
) -> None:
    from rich.live import Live
    from rich.text import Text

    from zmqdist.observe.status import checked

    with Live(auto_refresh=False, screen=True) as live:
        due = time.monotonic()
        while True:
            try:
                live.update(_page(checked(dispatcher.call("facts"))), refresh=True)
            except OpError as error:  # the dispatcher may be restarted, so the command continues
                text = f"{error}\ntrying again; press q to end this command"
                live.update(Text(text, style="red"), refresh=True)
            due = max(due + interval_s, time.monotonic())
            if ends_within(due - time.monotonic()):
                return


def _page(record: Mapping[str, Any]) -> Any:
    """Return a status record as text and tables of rich. The tables have the rows that `zmqdist
    status` prints."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from zmqdist.observe import status

    parts: list[Any] = [
        Text(status.headline(record), style="bold"),
        *map(Text, status.size(record)),
    ]
    parts += [Text(line, style="yellow") for line in status.troubles(record)]
    for table in status.tables(record):
        shown = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, expand=False)
        for name in table.columns:
            shown.add_column(
                name.removeprefix(">"), justify="right" if name.startswith(">") else "left"
            )
        for row in table.rows:
            # Pass Text to rich, because rich would interpret markup in a str, and the str is from
            # another process.
            shown.add_row(*(Text(cell) for cell in row))
        parts.append(shown)
    return Group(*parts)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Return a context manager that yields a function `wait(seconds)`. The function returns True as
    soon as the user presses q or standard input ends, and False when the seconds have passed.
    """
    if not sys.stdin.isatty():
        yield lambda wait_s: bool(select.select([], [], [], max(0.0, wait_s))[0])
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def wait(wait_s: float) -> bool:
        until = time.monotonic() + max(0.0, wait_s)
        while select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
            pressed = os.read(fd, 64)
            if not pressed or b"q" in pressed.lower():
                return True
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
