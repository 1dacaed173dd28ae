"""Requests to a dashboard, as a browser makes them or not."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

PATIENCE_S = 20.0


class Visitor:
    """Makes requests to a dashboard."""

    def __init__(self, url: str) -> None:
        place, _, self.code = url.partition("/#code=")
        self.port = int(place.rpartition(":")[2])

    def request(
        self, path: str, method: str = "GET", body: str = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, names)
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return response.status, fields, response.read()

    def exchange(self, code: str) -> tuple[int, dict[str, str]]:
        status, _, body = self.request("/api/session", "POST", json.dumps({"code": code}))
        return status, json.loads(body)

    def token(self) -> str:
        return self.exchange(self.code)[1]["token"]

    @contextlib.contextmanager
    def stream(self, token: str, buffer_bytes: int = 0) -> Iterator[Iterator[Any]]:
        """`buffer_bytes` is how much the kernel keeps that is not read; 0 leaves it to the
        kernel."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            if buffer_bytes:
                connection.sock = socket.socket()
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
                connection.sock.settimeout(PATIENCE_S)
                connection.sock.connect(("127.0.0.1", self.port))
            connection.request("GET", "/api/facts", headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            assert response.status == 200
            with contextlib.closing(response):
                yield (json.loads(line) for line in iter(response.readline, b""))
