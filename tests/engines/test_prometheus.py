"""A real Prometheus scrapes `zmqdist metrics` with a token over TLS, and is asked by its HTTP API.

It needs the program `prometheus`, of Debian's package of this name.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import COMMAND
from tests.launch.helpers import eventually
from tests.ports import free_port

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's package prometheus")

CONFIG = """\
global: {scrape_interval: 1s}
scrape_configs:
  - job_name: zmqdist
    scheme: https
    authorization: {credentials_file: token}
    tls_config: {ca_file: cert.pem}
    static_configs: [{targets: ["ADDRESS"]}]
  - job_name: wrong
    scheme: https
    authorization: {credentials: wrong-wrong-wrong-wrong}
    tls_config: {ca_file: cert.pem}
    static_configs: [{targets: ["ADDRESS"]}]
"""


def square(number: int) -> int:
    return number * number


def inverse(number: int) -> float:
    return 1 / number


class Prometheus:
    """A running Prometheus, and `zmqdist metrics` beside it."""

    def __init__(self, folder: Path, cluster: zd.local_cluster) -> None:
        make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", "key.pem", "-out", "cert.pem"]
        command = [*make, "-nodes", "-days", "2", *files, *names]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        (folder / "token").write_text("0123456789abcdef0123456789abcdef\n")
        own = ["--token-file", str(cluster.credentials.token_file), "--bind", "127.0.0.1:0"]
        tls = ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--scrape-token-file", "token"]
        address = cluster.target.removeprefix("zmq://")
        self.exporter = subprocess.Popen(
            [*COMMAND, "metrics", address, *own, *tls, "--interval", "0.1", "--timeout", "1"],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.exporter.stdout is not None
        where = urllib.parse.urlsplit(self.exporter.stdout.readline().split()[-1]).netloc
        (folder / "prometheus.yml").write_text(CONFIG.replace("ADDRESS", where))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1/"
        self.log = (folder / "log").open("w")
        assert PROMETHEUS is not None
        self.process = subprocess.Popen(
            [
                PROMETHEUS,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
        )

    def ask(self, path: str, **query: str) -> Any:
        address = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=20) as response:
            return json.load(response)["data"]

    def value(self, expression: str) -> float | None:
        """The value of an expression that has one; None while there is none."""
        try:
            rows = self.ask("query", query=expression)["result"]
        except (urllib.error.URLError, ConnectionError):  # it still starts
            return None
        return float(rows[0]["value"][1]) if rows else None

    def close(self) -> None:
        for process in (self.process, self.exporter):
            process.terminate()
            process.wait(30)
        assert self.exporter.stdout is not None
        self.exporter.stdout.close()
        self.log.close()


@pytest.fixture
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=2) as made:
        yield made


@pytest.fixture
def prometheus(tmp_path: Path, cluster: zd.local_cluster) -> Iterator[Prometheus]:
    made = Prometheus(tmp_path, cluster)
    yield made
    made.close()


def test_prometheus_reads_figures(prometheus: Prometheus, cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        coordinator.gather(coordinator.map(square, range(200)))
        assert coordinator.submit(inverse, 0).exception() is not None
        done = "zmqdist_work_done_total"
        eventually(lambda: prometheus.value(done) == 201, done, 60)
    assert prometheus.value("zmqdist_up") == 1
    assert prometheus.value('sum(zmqdist_workers{state="alive"})') == 2
    assert prometheus.value("sum(zmqdist_worker_slots)") == 2
    runs = 'zmqdist_function_duration_seconds_count{function=~".*square"}'
    eventually(lambda: prometheus.value(runs) == 200, runs, 60)
    memory = "sum(zmqdist_worker_resident_memory_bytes)"
    eventually(lambda: (prometheus.value(memory) or 0) > 1e6, memory, 60)
    assert prometheus.value('up{job="zmqdist"}') == 1
    assert prometheus.value('up{job="wrong"}') == 0
    names = prometheus.ask("metadata")
    assert names["zmqdist_work_submitted"][0]["type"] == "counter"
    assert names["zmqdist_function_duration_seconds"][0]["type"] == "summary"
    errors = [row["lastError"] for row in prometheus.ask("targets")["activeTargets"]]
    assert sorted(errors) == ["", "server returned HTTP status 401 Unauthorized"]


def test_dispatcher_that_ends_is_down(prometheus: Prometheus, cluster: zd.local_cluster) -> None:
    eventually(lambda: prometheus.value("zmqdist_up") == 1, "zmqdist_up", 60)
    cluster.close()
    eventually(lambda: prometheus.value("zmqdist_up") == 0, "zmqdist_up", 60)
    assert prometheus.value('up{job="zmqdist"}') == 1


def test_queries_of_board_are_valid(prometheus: Prometheus) -> None:
    eventually(lambda: prometheus.value("zmqdist_up") == 1, "zmqdist_up", 60)
    board = json.loads((Path(__file__).parents[2] / "deploy/grafana.json").read_text())
    variables = {"$__rate_interval": "1m", "$job": ".*", "$instance": ".*"}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            assert prometheus.ask("query", query=expression)["resultType"] == "vector"
