"""What functions print arrives at the program and at `zmqdist logs`, once."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.cli.helpers import COMMAND, run_here
from tests.ports import free_port
from tests.scheduling.work import until
from zmqdist import errors
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.launch.connection import DispatcherClient, client_of
from zmqdist.launch.log_follower import ALL, FROM_NOW, KEPT, LogFollower, line_of
from zmqdist.scheduling.dispatcher import log_stream
from zmqdist.transport.credentials import Credentials

FLOOD = 1_000_000


def say(*words: str) -> None:
    for word in words:
        print(word)


def warn(text: str) -> None:
    logging.getLogger("mine").warning(text)


def die(text: str) -> None:
    print(text, end="", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def write_junk() -> None:
    sys.stdout.buffer.write(b"\x1b[2J\x1b[31mred\x1b[0m \xff\x07\n")
    sys.stdout.flush()


def flood() -> float:
    begin_s = time.monotonic()
    for number in range(FLOOD):
        print("line", number)
    return time.monotonic() - begin_s


class Talker:
    def say(self, text: str) -> None:
        print(text)


class Captured:
    """The lines that this program has printed, by stream."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def has(self, text: str) -> bool:
        out, err = self._capsys.readouterr()
        self.out += out
        self.err += err
        return text in self.out or text in self.err


@pytest.fixture
def captured(capsys: pytest.CaptureFixture[str]) -> Captured:
    return Captured(capsys)


@pytest.fixture
def cluster() -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1) as made:
        yield made


@pytest.fixture
def coordinator(cluster: zd.local_cluster) -> Iterator[ClusterCoordinator]:
    with cluster.coordinator() as made:
        yield made


def kept_rows(cluster: zd.local_cluster, worker: str = "") -> list[list[Any]]:
    address = cluster.target.removeprefix("zmq://")
    with DispatcherClient(address, cluster.credentials, "client", 20.0) as dispatcher:
        rows: list[list[Any]] = dispatcher.call("logs", worker, KEPT, 0.0)["rows"]
    return rows


def command(cluster: zd.local_cluster, *words: str) -> list[str]:
    return [
        "logs", cluster.target, *words, "--token-file", str(cluster.credentials.token_file),
    ]  # fmt: skip


def test_prints_and_logs_arrive_once_by_stream(captured: Captured) -> None:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        coordinator.submit(say, "one", "two").result()
        coordinator.submit(warn, "careful").result()
    captured.has("")
    assert captured.out.splitlines() == ["[worker-0] one", "[worker-0] two"]
    assert captured.err.splitlines() == ["[worker-0] careful"]


def test_lines_of_several_workers_arrive(captured: Captured) -> None:
    with zd.local_cluster(workers=2) as cluster, cluster.coordinator() as coordinator:
        coordinator.gather([coordinator.options(worker=i).submit(say, str(i)) for i in range(2)])
        cluster.scale(3)
        coordinator.options(worker=2).submit(say, "2").result()
    captured.has("")
    assert sorted(captured.out.splitlines()) == [f"[worker-{i}] {i}" for i in range(3)]


def test_actor_prints_arrive(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, captured: Captured
) -> None:
    coordinator.actor(Talker).say("from an actor").result()
    until(lambda: captured.has("[worker-0] from an actor\n"))
    assert kept_rows(cluster)[-1][3] == "actor Talker"


def test_last_words_of_a_killed_slot_arrive(
    coordinator: ClusterCoordinator, captured: Captured
) -> None:
    with pytest.raises(errors.WorkerLost):
        coordinator.submit(die, "no newline").result()
    until(lambda: captured.has("[worker-0] no newline\n"))


def test_last_words_of_an_exit_arrive(captured: Captured) -> None:
    with zd.local_cluster(workers=1) as cluster, cluster.coordinator() as coordinator:
        coordinator.submit(say, "the last").result()
    captured.has("")
    assert captured.out == "[worker-0] the last\n"


def test_junk_and_escapes_are_shown_as_text(
    coordinator: ClusterCoordinator, captured: Captured
) -> None:
    coordinator.submit(write_junk).result()
    until(lambda: captured.has("[worker-0] ?[2Jred \ufffd?\n"))


def test_flood_neither_stops_a_slot_nor_fills_memory(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, captured: Captured
) -> None:
    assert coordinator.submit(flood).result(50) < 50
    coordinator.submit(say, "after it").result()
    until(lambda: captured.has("[worker-0] after it\n"))
    lines = captured.out.splitlines() + captured.err.splitlines()
    left_out = [
        int(m.group(1).replace(",", ""))
        for m in map(re.compile(r"\[worker-0\] \.\.\. ([\d,]+) lines left out").match, lines)
        if m
    ]
    printed = sum(line.startswith("[worker-0] line ") for line in lines)
    assert printed + sum(left_out) == FLOOD
    assert printed < FLOOD / 10
    assert captured.out.count(f"line {FLOOD - 1}\n") == 1


def test_streams_are_shared_without_logs(capfd: pytest.CaptureFixture[str]) -> None:
    with zd.local_cluster(workers=1, logs=False) as cluster, cluster.coordinator() as coordinator:
        coordinator.submit(say, "plain").result()
    assert "plain" in capfd.readouterr().out.splitlines()


def test_connect_prints_what_comes_later(
    cluster: zd.local_cluster,
    coordinator: ClusterCoordinator,
    captured: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator.submit(say, "before").result()
    until(lambda: captured.has("before"))
    with zd.connect(cluster.target, logs=True):

        def seen_twice(number: int) -> bool:
            coordinator.submit(say, f"later {number}").result()
            until(lambda: captured.has(f"later {number}"))
            return captured.out.count("later") > number + 1

        numbers = iter(range(10_000))
        until(lambda: seen_twice(next(numbers)))
    assert captured.out.count("before") == 1


def test_follower_goes_on_after_the_dispatcher(
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start_worker: Callable[..., Any],
    captured: Captured,
) -> None:
    port = free_port()
    dispatcher = start_dispatcher(port=port, lease_s=2.0)
    address = f"127.0.0.1:{port}"
    start_worker(address, echo=False, index=0)
    follower = LogFollower(client_of(address, Credentials()), since=0)
    try:
        with ClusterCoordinator(address) as coordinator:
            coordinator.submit(say, "first").result(20)
            until(lambda: captured.has("[worker-0] first\n"))
            dispatcher.kill()
            dispatcher.wait()
            start_dispatcher(port=port, lease_s=2.0)

            def is_shown() -> bool:
                coordinator.submit(say, "again").result(20)
                return captured.has("[worker-0] again\n")

            until(is_shown)
    finally:
        follower.close()


@pytest.mark.parametrize("since", [FROM_NOW, ALL])
def test_lines_come_once_after_a_new_dispatcher(
    since: int,
    start_dispatcher: Callable[..., subprocess.Popen[str]],
    start_worker: Callable[..., Any],
    captured: Captured,
) -> None:
    port = free_port()
    dispatcher = start_dispatcher(port=port, lease_s=2.0)
    address = f"127.0.0.1:{port}"
    worker = start_worker(address, echo=False, index=0)
    asked: list[int] = []

    def open_client(timeout_s: float) -> Any:
        client = client_of(address, Credentials())(timeout_s)
        call = client.call
        client.call = lambda name, worker, since, *rest, **options: (  # type: ignore[method-assign]
            asked.append(since) or call(name, worker, since, *rest, **options)
        )
        return client

    follower = LogFollower(open_client, since=since)
    try:
        until(lambda: len(asked) > (since == FROM_NOW))
        with ClusterCoordinator(address) as coordinator:
            coordinator.submit(say, "first").result(20)
            until(lambda: captured.has("[worker-0] first\n"))
            worker.signal(signal.SIGSTOP)  # it registers after the follower has asked
            dispatcher.kill()
            dispatcher.wait()
            count = len(asked)
            start_dispatcher(port=port, lease_s=2.0)
            until(lambda: len(asked) > count)
            worker.signal(signal.SIGCONT)
            coordinator.submit(say, "again").result(20)
            until(lambda: captured.has("[worker-0] again\n"))
            assert captured.out.count("first") == 1
    finally:
        follower.close()


def test_command_follows_a_new_dispatcher(
    start_dispatcher: Callable[..., subprocess.Popen[str]], start_worker: Callable[..., Any]
) -> None:
    port = free_port()
    dispatcher = start_dispatcher(port=port, lease_s=2.0)
    address = f"127.0.0.1:{port}"
    start_worker(address, echo=False, index=0)
    with ClusterCoordinator(address) as coordinator:
        coordinator.submit(say, "first").result(20)
        follower = subprocess.Popen(
            [*COMMAND, "logs", address, "-f"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        try:
            assert follower.stdout.readline() == "[worker-0] first\n"
            dispatcher.kill()
            dispatcher.wait()
            start_dispatcher(port=port, lease_s=2.0)
            coordinator.submit(say, "again").result(20)
            assert follower.stdout.readline() == "[worker-0] again\n"
        finally:
            follower.send_signal(signal.SIGINT)
            _, problems = follower.communicate(timeout=20)
    assert "trying again" in problems
    assert follower.returncode == 0


def test_command_prints_the_lines_of_one_worker(cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        coordinator.submit(say, "mine").result()
    # the result may overtake the line
    until(lambda: run_here(*command(cluster, "worker:0")).out == "[worker-0] mine\n")
    assert "no worker worker:5 is registered" in run_here(*command(cluster, "worker:5")).err


def test_command_prints_json_lines(cluster: zd.local_cluster) -> None:
    with cluster.coordinator() as coordinator:
        coordinator.submit(write_junk).result()
    (line,) = until(lambda: run_here(*command(cluster, "--json")).out.splitlines())
    record = json.loads(line)
    assert record.pop("at").startswith("20")
    assert record == {
        "worker": "worker:0",
        "process": "slot 0",
        "stream": "stdout",
        "text": "\x1b[2J\x1b[31mred\x1b[0m \ufffd\x07",
    }


def test_command_follows(cluster: zd.local_cluster, coordinator: ClusterCoordinator) -> None:
    coordinator.submit(say, "before").result()
    follower = subprocess.Popen(
        [*COMMAND, *command(cluster, "-f")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "[worker-0] before\n"
        coordinator.submit(say, "then").result()
        assert follower.stdout.readline() == "[worker-0] then\n"
        follower.send_signal(signal.SIGINT)
        assert follower.stdout.read() == ""
        assert follower.wait(20) == 0
    finally:
        follower.kill()
        follower.wait()
        follower.stdout.close()


def test_slow_program_hears_what_it_missed(
    cluster: zd.local_cluster, coordinator: ClusterCoordinator, captured: Captured
) -> None:
    coordinator.submit(say, "one", "two", "three").result()
    until(lambda: captured.has("three"))
    address = cluster.target.removeprefix("zmq://")
    with DispatcherClient(address, cluster.credentials, "client", 20.0) as dispatcher:
        assert [row[5] for row in dispatcher.call("logs", "", 1, 0.0)["rows"]] == ["two", "three"]


def test_line_of_a_notice_has_no_worker() -> None:
    assert line_of([1, "", 0.0, "", 2, "... 3 lines left out"]) == "... 3 lines left out"
    assert log_stream.KEPT == KEPT
