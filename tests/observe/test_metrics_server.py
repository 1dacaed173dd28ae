"""The server of metrics: who may read, silent peers, TLS."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.observe.dashboard.made_up import MadeUp
from zmqdist.errors import FailedPreconditionError, UnavailableError
from zmqdist.observe.metrics_server import CONNECTIONS_MAX, MetricsServer

TOKEN = "0123456789abcdef"


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return str(tmp_path / "token")


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(MadeUp().call, "127.0.0.1:0", 1.0) as opened:
        yield opened


def get(
    server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=20)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_scrape_has_type_and_figures(server: MetricsServer) -> None:
    status, text = get(server)
    assert status == 200
    assert "# TYPE zmqdist_work_submitted_total counter\n" in text


def test_openmetrics_is_sent_on_request(server: MetricsServer) -> None:
    _, text = get(server, Accept="application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Authorization": f"Bearer {TOKEN}"}, 200),
        ({"Authorization": f"Bearer {TOKEN}", "Host": "node-3:9464"}, 200),
    ],
)
def test_token_is_needed(token_file: str, headers: dict[str, str], status: int) -> None:
    with MetricsServer(MadeUp().call, "127.0.0.1:0", 1.0, token_file) as server:
        code, text = get(server, **headers)
    assert code == status
    assert ("zmqdist_up" in text) == (status == 200)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "127.0.0.1.evil.example", ""]
)
def test_rebound_name_is_refused_without_token(server: MetricsServer, host: str) -> None:
    assert get(server, Host=host) == (403, "")
    assert get(server, Host="localhost:1")[0] == 200
    assert get(server, Host="[::1]")[0] == 200


@pytest.mark.parametrize("path", ["/", "/metrics/../etc/passwd", "/%2e%2e/metrics"])
def test_unknown_paths_are_not_found(server: MetricsServer, path: str) -> None:
    assert get(server, path) == (404, "the metrics are at /metrics\n")


def test_post_is_refused(server: MetricsServer) -> None:
    assert get(server, method="POST")[0] == 501


def test_silent_peers_leave_room_when_they_go(server: MetricsServer) -> None:
    where = urlsplit(server.url)
    assert where.hostname is not None
    silent = [
        socket.create_connection((where.hostname, where.port or 0)) for _ in range(CONNECTIONS_MAX)
    ]
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        get(server)  # the server accepts in order
    for peer in silent:
        peer.close()
    for _ in range(1000):
        try:
            status, _ = get(server)
        except (ConnectionError, http.client.HTTPException):
            continue
        break
    assert status == 200


def test_address_of_other_hosts_needs_token(token_file: str) -> None:
    with pytest.raises(FailedPreconditionError, match="other hosts can reach 0"):
        MetricsServer(MadeUp().call, "0.0.0.0:0", 1.0)
    with MetricsServer(MadeUp().call, "0.0.0.0:0", 1.0, token_file) as server:
        assert server.url.startswith("http://0.0.0.0:")


def test_unusable_files_and_ports_are_named(tmp_path: Path, server: MetricsServer) -> None:
    short = tmp_path / "short"
    short.write_text("abc")
    cases = [
        ({"token_file": str(short)}, "too short"),
        ({"token_file": str(tmp_path / "none")}, "cannot be read: No such file"),
        ({"tls": (str(short), str(short))}, "cannot be used"),
    ]
    for options, problem in cases:
        with pytest.raises(FailedPreconditionError, match=problem):
            MetricsServer(MadeUp().call, "127.0.0.1:0", 1.0, **options)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="Address already in use"):
        MetricsServer(MadeUp().call, urlsplit(server.url).netloc, 1.0)


def test_silent_peer_does_not_block_handshake_of_others(tmp_path: Path, token_file: str) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subprocess.run(
        [*command, "-nodes", "-days", "2", *files, *names],
        check=True,
        capture_output=True,
        timeout=50,
    )
    tls = (str(certificate), str(key))
    with MetricsServer(MadeUp().call, "127.0.0.1:0", 1.0, token_file, tls) as server:
        where = urlsplit(server.url)
        assert where.scheme == "https"
        assert where.hostname is not None
        with socket.create_connection((where.hostname, where.port or 0)):
            context = ssl.create_default_context(cafile=str(certificate))
            connection = http.client.HTTPSConnection(where.netloc, timeout=20, context=context)
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            assert connection.getresponse().status == 200
            connection.close()
