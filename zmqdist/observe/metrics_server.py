"""The web server of `zmqdist metrics`: one path, /metrics, which Prometheus scrapes.

Promises, checked by tests/observe/test_metrics_server.py
    W1  with a token, a request without it gets 401 and no figure; the token is compared in constant
        time
    W2  without a token the server listens on loopback only, and answers no request that names
        another host, which a page of the web would send by DNS rebinding
    W3  at most CONNECTIONS_MAX connections, each silent for at most SILENT_S, so that peers that
        send nothing take no thread for long; a TLS handshake blocks no other connection
    W4  it serves GET only, and changes nothing
"""

from __future__ import annotations

import hmac
import socket
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, Final

from zmqdist.addresses import is_ipv6, is_loopback, join_address, split_address
from zmqdist.errors import FailedPreconditionError, UnavailableError, needs
from zmqdist.observe.prometheus import ClusterCollector
from zmqdist.transport.endpoint import split

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

CONNECTIONS_MAX: Final = 16
SILENT_S: Final = 10.0
"""Seconds that a connection may be silent."""

TOKEN_BYTES_MIN: Final = 16
"""The fewest bytes of a token, so that it cannot be guessed."""


class MetricsServer:
    """A running server of metrics, for a with-statement.

    Args:
      call: calls a method of the dispatcher by name, and blocks until it has the result.
      bind: "host:port" to listen on; port 0 takes a free one.
      interval_s: the shortest time between two calls of the dispatcher.
      token_file: a file with the token that scrapers send; None for none, on loopback.
      tls: the files of a certificate (with its chain) and of its key, in PEM; None for HTTP.

    Raises:
      FailedPreconditionError: prometheus-client is not installed, the token or the certificate
        cannot be used, or other hosts can reach `bind` and there is no token.
      UnavailableError: the port cannot be bound.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        bind: str,
        interval_s: float,
        token_file: str | None = None,
        tls: tuple[str, str] | None = None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ImportError:
            raise FailedPreconditionError(needs("metrics", "'zmqdist[metrics]'")) from None
        host, port = split(bind)
        token = None if token_file is None else _token(token_file)
        if token is None and not is_loopback(host):
            raise FailedPreconditionError(
                f"other hosts can reach {bind}: give a token (--scrape-token-file), or stay on "
                f"127.0.0.1"
            )
        registry = CollectorRegistry()
        registry.register(ClusterCollector(call, interval_s))
        context = None if tls is None else _context(*tls)
        try:
            self._server = _Server((host, port), registry, token, context)
        except OSError as error:
            problem = f"the metrics cannot listen on {bind}: {error.strerror or error}"
            raise UnavailableError(problem) from None
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{join_address(host, self._server.server_port)}/metrics"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="zmqdist-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server. Requests that are being answered end by themselves."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    """Gives each connection a thread, up to CONNECTIONS_MAX."""

    def __init__(
        self,
        address: tuple[str, int],
        registry: CollectorRegistry,
        token: bytes | None,
        context: ssl.SSLContext | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if is_ipv6(address[0]) else socket.AF_INET
        self.registry, self.token, self.context = registry, token, context
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer would look up the name of this host, which may take long
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing, because the peer has gone or speaks another protocol."""


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: _Server
    timeout = SILENT_S
    server_version, sys_version = "zmqdist", ""

    def setup(self) -> None:
        if self.server.context is not None:
            self.request.settimeout(SILENT_S)
            # the handshake takes place in the thread of this connection
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        super().finish()
        self.request.close()  # that of TLS, which the server does not know

    def do_GET(self) -> None:
        status, body, kind = 200, b"", "text/plain; charset=utf-8"
        if not self._may_read():
            status = 403 if self.server.token is None else 401
        elif self.path.partition("?")[0] != "/metrics":
            status, body = 404, b"the metrics are at /metrics\n"
        else:
            from prometheus_client.exposition import choose_encoder

            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.registry)
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _may_read(self) -> bool:
        if self.server.token is not None:
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            is_equal = hmac.compare_digest(
                token.strip().encode(errors="replace"), self.server.token
            )
            return is_equal and scheme.lower() == "bearer"
        host = self.headers.get("Host", "")
        try:
            return is_loopback(split_address(host if host[-1:].isdigit() else f"{host}:80")[0])
        except ValueError:
            return False

    def log_message(self, *_: object) -> None:
        """Write nothing for a request."""


def _token(file: str) -> bytes:
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        problem = f"the token in {file} cannot be read: {error.strerror}"
        raise FailedPreconditionError(problem) from None
    if len(token) < TOKEN_BYTES_MIN:
        raise FailedPreconditionError(
            f"the token in {file} is too short: make one with `openssl rand -hex 32`"
        )
    return token


def _context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        problem = f"the certificate {certificate} with the key {key} cannot be used: {error}"
        raise FailedPreconditionError(problem) from None
    return context
