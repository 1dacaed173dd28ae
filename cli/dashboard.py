"""`zmqdist dashboard [TARGET]`: serve a read-only page about a running cluster, until Ctrl-C."""

from __future__ import annotations

import signal
import threading
from typing import Any

import click

from zmqdist.launch.connection import DispatcherClient
from zmqdist_cli.common import locate, target_options


@click.command(short_help="Show a running cluster in the browser.")
@click.argument("target", required=False)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port on 127.0.0.1; a free one if you leave it out.",
)
@target_options
def dashboard(target: str | None, *, port: int, timeout_s: float, **secrets: Any) -> None:
    """Serve a page that shows what runs and what waits on the dispatcher TARGET, what failed, and
    which function takes the time. The command prints a link; Ctrl-C ends it.

    A link opens the page once, and the command then prints a new one. Only browsers on this host
    reach the page, which can change nothing. From another host, forward the port of the link:
    ssh -L 8787:127.0.0.1:8787 HOST, with --port 8787.
    """
    from zmqdist.observe.dashboard.server import Dashboard

    end_event = threading.Event()
    with DispatcherClient(*locate(target, **secrets), "observe", timeout_s) as dispatcher:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: end_event.set())
        with Dashboard(dispatcher.call, port, click.echo):
            end_event.wait()
