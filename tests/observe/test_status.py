"""What `status` and `top` show, from records made by hand: exact lines, and no harm done by texts
of other processes."""

from __future__ import annotations

from typing import Any

import pytest

from zmqdist.observe import status
from zmqdist.rpc import Client
from zmqdist.scheduling.shared.config import DispatcherConfig
from zmqdist.servers.dispatch_server import DispatchServer


def worker(**changes: Any) -> dict[str, Any]:
    row = {
        "name": "worker:0",
        "state": "alive",
        "slots": 2,
        "threads_per_slot": 1,
        "pid": 41,
        "host": "alpha",
        "leases": 5,
        "running": 2,
    }
    return {
        **row,
        "window": 8,
        "done": 1200,
        "rate": 310.4,
        "idle_s": 0.26,
        "age_s": 9.0,
        **changes,
    }


def record(**changes: Any) -> dict[str, Any]:
    empty = {"address": "127.0.0.1:5050", "pid": 7, "queued": 0, "workers": [], "coordinators": []}
    return {
        **empty,
        "losses_count": 0,
        "losses": [],
        "dropped": {},
        "refused_handshakes": 0,
        **changes,
    }


def loss(**changes: Any) -> dict[str, Any]:
    return {
        "name": "worker:1",
        "reason": "its process ended",
        "exit_code": -9,
        "ago_s": 3.0,
        **changes,
    }


def test_record_as_aligned_tables() -> None:
    full = record(
        queued=10_000,
        workers=[
            worker(failed=2, rss_bytes=410_000_000, cpu_percent=7.0),
            worker(name="worker:10", leases=0, running=0, rate=99.0, state="away"),
        ],
        coordinators=[
            {
                "coordinator": 0xABC,
                "queued": 9,
                "out": 5,
                "held": 0,
                "submitted": 20,
                "finished": 6,
                "functions": 1,
            }
        ],
        losses_count=1,
        losses=[loss()],
    )
    assert status.lines(full) == [
        (
            "dispatcher at 127.0.0.1:5050 (pid 7): 2 workers, 4 slots, 10,000 queued, 3 given out, 2 "
            "running, 2,400 done, 310/s, 1 loss"
        ),
        "",
        "workers",
        (
            "  name       state  slots  threads  running  waiting   done  per s  failed  memory  CPU"
            "      heard  host   pid"
        ),
        (
            "  worker:0   alive      2        1        2        3  1,200    310       2  410 MB  7 %"
            "  0.3 s ago  alpha   41"
        ),
        (
            "  worker:10  away       2        1        0        0  1,200      0       0          0 %"
            "  0.3 s ago  alpha   41"
        ),
        "",
        "coordinators",
        "  id        queued  out  held  submitted  finished  functions",
        "  00000abc       9    5     0         20         6          1",
        "",
        "lost workers (last 1 of 1)",
        "  name      when       how                why",
        "  worker:1  3.0 s ago  killed by SIGKILL  its process ended",
    ]


def test_resources_and_what_waits_for_them_are_shown() -> None:
    full = record(
        workers=[worker(resources={"gpu": (1.5, 2.0), "licence": (0.0, 1.0)}), worker(name="w:1")],
        demands=[
            {"request": "gpu 2", "worker": "", "waiting": 1200, "why": "all is in use"},
            {"request": "x 1", "worker": "worker:0", "waiting": 1, "why": "no worker has so much"},
        ],
    )
    assert status.resources(full).lines() == [
        "resources in use",
        "  name      in use",
        "  worker:0  gpu 1.5 of 2, licence 0 of 1",
    ]
    assert status.demands(full).lines() == [
        "functions that wait for resources",
        "  waiting  each needs  pinned to  why",
        "    1,200  gpu 2                  all is in use",
        "        1  x 1         worker:0   no worker has so much",
    ]
    assert status.demands(full).lines()[0] in status.lines(full)


def test_reason_why_work_waits_is_shown_whole() -> None:
    detail = "each needs gpu 1; no worker has so much" + "; worker:0 has nothing" * 5
    row = {"coordinator": 1, "reason": "resources", "detail": detail, "count": 12}
    assert detail in status.waiting(record(waiting=[row])).lines()[2]


def test_actors_have_a_table() -> None:
    live = {
        "actor": 0x123,
        "name": "",
        "cls": "Counter",
        "state": "live",
        "worker": "worker:0",
        "restarts": 3,
        "restarts_left": 2,
        "reason": "its process ended: killed by SIGKILL",
    }
    waiting = {**live, "name": "n", "state": "pending", "worker": "", "reason": "no room"}
    calls = {"calls": 1200, "failed": 3, "waiting": 2, "p50_s": 0.00123, "p99_s": 1.25}
    live |= {**calls, "rss_bytes": 41_000_000}
    table = status.actors(record(workers=[worker(actors_max=64)], actors=[live, waiting]))
    assert table.lines() == [
        "actors (2; the workers may have 64)",
        (
            "  name      class    state    worker    calls  failed  waiting      p50    p99  memory"
            "  restarts  why"
        ),
        (
            "  00000123  Counter  live     worker:0  1,200       3        2  1.23 ms  1.2 s   41 MB"
            "       1/3  its process ended: killed by SIGKILL"
        ),
        (
            "  n         Counter  pending                0       0        0    0.0 s  0.0 s        "
            "       1/3  no room"
        ),
    ]


def test_launched_cluster_shows_size() -> None:
    none = {"starting": [], "leaving": [], "failed": []}
    fixed = {"wanted": 2, "min": None, "max": None, "idle_s": None, **none}
    bounded = {
        "wanted": 3,
        "min": 1,
        "max": 8,
        "idle_s": 30.0,
        **none,
        "starting": ["worker:1", "worker:2"],
    }
    assert status.size(record()) == []
    assert status.size(record(scaling=fixed)) == ["workers: 2 wanted"]
    assert status.size(record(scaling=bounded)) == [
        "workers: 3 wanted; min 1, max 8, idle after 30 s; starting: worker:1, worker:2"
    ]


def test_status_without_workers_has_remedy() -> None:
    assert status.lines(record()) == [
        (
            "dispatcher at 127.0.0.1:5050 (pid 7): 0 workers, 0 slots, 0 queued, 0 given out, 0 "
            "running, 0 done, 0/s"
        ),
        "no worker has registered: zmqdist worker --dispatcher 127.0.0.1:5050",
    ]


def test_record_of_real_dispatcher() -> None:
    with (
        DispatchServer(DispatcherConfig()) as server,
        Client.create("zmq", server.address) as client,
    ):
        text = client.facts_blocking()  # type: ignore[attr-defined]
    assert status.lines(text)[0].startswith(f"dispatcher at {server.address} (pid ")


def test_latest_losses_come_first() -> None:
    many = [loss(name=f"worker:{number}", ago_s=100.0 - number) for number in range(30)]
    table = status.losses(record(losses=many, losses_count=44))
    assert [row[0] for row in table.rows] == [
        f"worker:{29 - at}" for at in range(status.LOSSES_SHOWN_MAX)
    ]
    assert table.title == "lost workers (last 10 of 44)"


@pytest.mark.parametrize(
    ("code", "text"),
    [(None, "-"), (-11, "killed by SIGSEGV"), (3, "exit code 3"), (0, "exit code 0")],
)
def test_exit_code_in_words(code: int | None, text: str) -> None:
    assert status.losses(record(losses=[loss(exit_code=code)])).rows[0][2] == text


def test_slot_deaths_and_relays_are_shown() -> None:
    last = {"name": "worker:1", "exit_code": -9, "ago_s": 12.0}
    workers = [
        worker(slot_deaths=2),
        worker(name="worker:1", slot_deaths=1),
        worker(name="worker:2", slot_deaths=0),
    ]
    text = status.troubles(
        record(workers=workers, slot_deaths_count=4, last_slot_death=last, relayed=1)
    )
    assert text == [
        (
            "4 slot processes died while running a function (worker:0 2, worker:1 1): the last 12 s "
            "ago at worker:1, killed by SIGKILL"
        ),
        (
            "1 piece of large payloads passed through the dispatcher, because a data port could not "
            "be reached"
        ),
    ]


def test_refused_connections_are_shown() -> None:
    assert status.troubles(record(dropped={"garbage": 0})) == []
    assert status.troubles(record(dropped={"garbage": 2, "another": 1}, refused_handshakes=3)) == [
        "3 connections refused: a wrong token or key, or no zmqdist",
        "messages dropped: another 1, garbage 2",
    ]


def test_texts_of_other_processes_cannot_write_to_the_terminal() -> None:
    evil = "\x1b[2J\nworker\x07" + "x" * 1000
    text = "\n".join(
        status.lines(record(workers=[worker(name=evil, host=evil)], losses=[loss(reason=evil)]))
    )
    assert all(char.isprintable() or char == "\n" for char in text)
    assert len(text) < 1500


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.1, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_800, "2 d"),
    ],
)
def test_duration_has_one_unit(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text


def test_running_functions_failures_and_reasons_have_tables() -> None:
    slot = {"slot": 1, "pid": 88, "state": "running", "function": "job.<f>", "work": 12}
    slot |= {"since_s": 75.0, "rss_bytes": 400_000_000, "cpu_percent": 3.0, "coordinator": 1}
    failure = {"function": "job.g", "at": 990.0, "worker": "worker:0", "pid": 88, "work": 7}
    failure |= {"error": "ValueError", "message": "bad\x1b[2J"}
    death = {"worker": "worker:0", "at": 995.0, "pid": 88, "function": "job.h", "exit_code": -11}
    death |= {"last_lines": "first\nlast\n"}
    full = record(
        at=1000.0,
        workers=[worker(slots_now=[slot, {**slot, "function": ""}])],
        waiting=[{"coordinator": 0xABC, "count": 30, "reason": "pinned", "detail": "worker:3"}],
        failures=[failure],
        slot_deaths=[death],
    )
    assert status.slots(full).lines() == [
        "running (1)",
        "  worker    slot  pid  function  work  since  memory  CPU",
        "  worker:0     1   88  job.<f>     12   75 s  400 MB  3 %",
    ]
    assert status.waiting(full).lines()[2] == (
        "  00000abc        30  waits for one worker: worker:3"
    )
    assert status.failures(full).lines()[2] == (
        "  job.g     10 s ago  worker:0   88     7  ValueError: bad?[2J"
    )
    assert status.slot_losses(full).lines()[2] == (
        "  worker:0  5.0 s ago   88  job.h     killed by SIGSEGV  last"
    )


def test_functions_have_a_table() -> None:
    row = {"name": "job.f", "count": 1200, "failed": 1, "running": 2, "queued": 3, "cpu_s": 8.0}
    row |= {"mean_s": 1.5e-5, "p50_s": 0.012, "p99_s": 90.0, "bytes_in": 512, "bytes_out": 3e9}
    assert status.functions(record(functions=[row])).lines() == [
        "functions (1)",
        "  name   ended  failed  running  queued   mean    p50   p99    CPU     in   out",
        "  job.f  1,200       1        2       3  15 us  12 ms  90 s  8.0 s  512 B  3 GB",
    ]
