"""`zmqdist metrics [TARGET]`: serve the figures of a running cluster for Prometheus, until
Ctrl-C."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from zmqdist.errors import UnavailableError
from zmqdist.launch.connection import DispatcherClient
from zmqdist_cli.common import interval_option, locate, target_options

if TYPE_CHECKING:
    from zmqdist.transport.credentials import Credentials


@click.command(short_help="Serve the figures of a running cluster for Prometheus.")
@click.argument("target", required=False)
@click.option(
    "--bind",
    default="127.0.0.1:9464",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen. An address that other hosts can reach needs a token.",
)
@click.option(
    "--scrape-token-file",
    metavar="FILE",
    help="File with a token of its own, which Prometheus sends (authorization).",
)
@click.option("--tls-cert", metavar="FILE", help="Certificate with its chain, in PEM, for HTTPS.")
@click.option("--tls-key", metavar="FILE", help="Key of the certificate, in PEM.")
@interval_option("Shortest time between two questions to the dispatcher, however many scrape.")
@target_options
def metrics(
    target: str | None,
    *,
    bind: str,
    scrape_token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    interval_s: float,
    timeout_s: float,
    **secrets: Any,
) -> None:
    """Serve http://HOST:PORT/metrics with the figures of the dispatcher TARGET: workers, queues,
    functions, actors, data jobs. Ctrl-C ends the command.

    While the dispatcher is away the command goes on, and the figure zmqdist_up is 0. Without a
    certificate the token travels as plain text.
    """
    from zmqdist.observe.metrics_server import MetricsServer

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
    end_event = threading.Event()
    with _Dispatcher(*locate(target, **secrets), timeout_s) as dispatcher:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: end_event.set())
        with MetricsServer(dispatcher.call, bind, interval_s, scrape_token_file, tls) as server:
            click.echo(f"metrics: {server.url}")
            end_event.wait()


class _Dispatcher:
    """A connection to a dispatcher that may begin later. Raises the errors of DispatcherClient,
    except that no dispatcher answers."""

    def __init__(self, address: str, credentials: Credentials, timeout_s: float) -> None:
        self._connect = partial(DispatcherClient, address, credentials, "observe", timeout_s)
        self._client: DispatcherClient | None = None
        with suppress(UnavailableError):
            self._client = self._connect()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the dispatcher; one thread at a time."""
        if self._client is None:
            self._client = self._connect()
        return self._client.call(method, *arguments)

    def __enter__(self) -> _Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
