"""The measuring itself, with numbers so small that the figures mean nothing: each question gives
its figure, and nothing stays behind."""

from __future__ import annotations

import gc
import signal
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from zmqdist.launch.local_cluster import local_cluster
from zmqdist.observe import bench
from zmqdist.observe.peer import peer_process, serving
from zmqdist.rpc import Server
from zmqdist.transport.pyzmq_echo import REPLY_BYTES_MAX, SIZED_REQUEST, BareClient, BareServer

TINY = bench.BenchPlan(
    blocks=2, calls=3, window=4, windows=2, tasks=10, sizes=(1000, 2 * bench.MIB), transfers=2
)


def test_bare_echo_returns_frame_or_bytes() -> None:
    server = BareServer("127.0.0.1:0")
    try:
        with BareClient(f"127.0.0.1:{server.port}") as client:
            assert len(client.round_trips(3)) == 3
            assert client.pipelined(7, 3) > 0
            assert client.fetch(5_000_000) > 0
            assert client.request(SIZED_REQUEST + b"no number") == SIZED_REQUEST + b"no number"
            assert (
                len(client.request(SIZED_REQUEST + str(REPLY_BYTES_MAX * 10).encode()))
                == REPLY_BYTES_MAX
            )
    finally:
        server.close()


def test_calls_are_measured_against_a_peer_in_another_process() -> None:
    with peer_process() as peer:
        figures = bench.measure_calls(peer, TINY)
    assert [(figure.name, figure.unit) for figure in figures] == [
        ("blocking call, inline handler", "us"),
        ("blocking call, handler in a thread", "us"),
        ("calls, 4 on the way", "calls/s"),
    ]
    assert all(figure.ours > 0 and figure.theirs and figure.ratio for figure in figures)


def test_tasks_round_trips_and_results_are_measured_on_a_cluster() -> None:
    with serving("127.0.0.1:0") as peer, local_cluster(workers=2) as cluster:
        figures = bench.measure_tasks(cluster, TINY)
        figures += bench.measure_round_trip(cluster, peer, TINY)
        figures += bench.measure_results(cluster, peer, TINY)
    assert [figure.name for figure in figures] == [
        "no-op tasks, 2 workers",
        "task, schedule to result",
        "result of 1,000 bytes",
        "result of 2 MiB",
    ]
    assert all(figure.ours > 0 and figure.theirs and figure.ratio for figure in figures)


def test_early_ctrl_c_leaves_no_semaphore(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracked = resource_tracker.register
    names: list[str] = []

    def interrupted(name: str, kind: str) -> None:
        names.append(name)
        if len(names) == 1:
            signal.raise_signal(signal.SIGINT)
        tracked(name, kind)

    monkeypatch.setattr(resource_tracker, "register", interrupted)
    with local_cluster(workers=1, processes=False) as cluster, pytest.raises(KeyboardInterrupt):
        bench.measure_tasks(cluster, TINY)
    gc.collect()
    assert len(names) > 1
    assert [name for name in names if Path(f"/dev/shm/sem.{name.removeprefix('/')}").exists()] == []


def test_rpc_server_is_no_peer() -> None:
    with (
        Server.create("zmq", "127.0.0.1:0") as server,
        pytest.raises(ValueError, match="no peer of a benchmark"),
    ):
        bench.measure_calls(server.address, TINY)


def test_ratio_is_median_of_blocks() -> None:
    ours = iter([1000.0, 10.0, 20.0, 90.0])
    theirs = iter([1000.0, 10.0, 10.0, 30.0])
    figure = bench.rates("x", "x/s", lambda: next(ours), "other", lambda: next(theirs), 3)
    assert (figure.ours, figure.theirs, figure.ratio) == (20.0, 10.0, 2.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0.12345, "0.123"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.45, "123"),
        (12345.6, "12,346"),
    ],
)
def test_figure_has_three_digits(number: float | None, text: str) -> None:
    assert bench.shown(number) == text


def test_table_has_row_per_figure() -> None:
    lines = bench.table(
        [bench.Figure("start", "s", 1.5), bench.Figure("call", "us", 80, 99, "bare", 40, 50, 2.0)]
    ).lines()
    assert [line.split() for line in lines[2:]] == [
        ["start", "1.50", "-", "s", "-", "-", "-", "-"],
        ["call", "80.0", "99.0", "us", "bare", "40.0", "50.0", "2.00", "x"],
    ]


def test_percentile_99_is_a_value() -> None:
    assert bench.p99([float(number) for number in range(100, 0, -1)]) == 100.0
    assert bench.p99([4.0]) == 4.0
