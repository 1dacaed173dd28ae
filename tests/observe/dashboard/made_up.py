"""Made-up facts of a cluster: for tests of the page's server, and of pages with more workers, and
worse names, than a test can start."""

from __future__ import annotations

import random
from typing import Any

FUNCTIONS = (
    ("train_step", 0.42),
    ("load_shard", 0.11),
    ("features.extract", 0.09),
    ("evaluate", 0.2),
    ("<lambda>", 0.004),
)
NASTY = '<script>alert("x")</script>\x1b[31mred\x1b[0m\u202egpj'
"""A name that is markup, moves the cursor of a terminal, and turns the direction of writing."""


class MadeUp:
    """A dispatcher that answers `facts`, `logs` and `stack` from a seed. Each call of `facts` is
    half a second later than the last one."""

    def __init__(
        self, workers: int = 4, slots: int = 2, *, seed: int = 7, nasty: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.workers, self.slots, self.nasty = workers, slots, nasty
        self.at, self.uptime_s = 1_796_000_000.0, 0.0
        self.seq = 0
        self.pid = 4711
        self.done = {name: 0 for name, _ in FUNCTIONS}
        self.failed = {name: 0 for name, _ in FUNCTIONS}
        self.rows: dict[str, list[Any]] = {
            "failures": [],
            "slot_deaths": [],
            "refusals": [],
            "timeline": [],
        }
        self.busy_until = [[self.at] * slots for _ in range(workers)]
        self.calls: list[str] = []
        self.logged = [
            (number, f"epoch {number}: loss {1 / number:.4f}") for number in range(1, 40)
        ]

    def call(self, method: str, *arguments: Any, timeout_s: float = 0.0) -> Any:
        self.calls.append(method)
        return getattr(self, method)(*arguments)

    def name_of(self, worker: int) -> str:
        return NASTY if self.nasty and worker == 0 else f"worker:{worker}"

    def advance(self, seconds: float = 0.5) -> None:
        end_s = self.at + seconds
        for worker in range(self.workers):
            for slot in range(self.slots):
                at = self.busy_until[worker][slot]
                while at < end_s:
                    name, mean_s = self.random.choice(FUNCTIONS)
                    took_s = self.random.expovariate(1 / mean_s)
                    failed = self.random.random() < 0.02
                    self.add_event(name, worker, slot, at, took_s, failed)
                    at += took_s + self.random.expovariate(40)
                self.busy_until[worker][slot] = at
        self.at, self.uptime_s = end_s, self.uptime_s + seconds

    def add_event(
        self, name: str, worker: int, slot: int, at: float, took_s: float, failed: bool
    ) -> None:
        shown = NASTY if self.nasty and name == "evaluate" else name
        self.done[name] += not failed
        self.failed[name] += failed
        work, number = self.number(), self.number()
        outcome = "error" if failed else "value"
        submitted = at - self.random.expovariate(2)
        times = (submitted, at - 0.01, at, at + took_s)
        self.rows["timeline"].append(
            [
                number,
                9,
                work,
                1,
                shown,
                self.name_of(worker),
                slot,
                *times,
                outcome,
                "task",
                submitted,
            ]
        )
        if failed:
            self.add_failure(shown, worker, work)

    def add_failure(self, function: str, worker: int, work: int) -> None:
        error = NASTY if self.nasty else "ValueError"
        frames = "".join(
            f'  File "train.py", line {line}, in {function}\n    step(batch, {line})\n'
            for line in (12, 40)
        )
        self.rows["failures"].append(
            {
                "seq": self.number(),
                "at": self.at,
                "function": function,
                "worker": self.name_of(worker),
                "host": "node-3",
                "pid": 5100 + worker,
                "coordinator": 9,
                "work": work,
                "attempt": 1,
                "error": error,
                "message": "shapes (32, 64) and (128,) differ",
                "traceback": f"Traceback (most recent call last):\n{frames}{error}: shapes differ",
            }
        )

    def add_death(self, worker: int) -> None:
        self.rows["slot_deaths"].append(
            {
                "seq": self.number(),
                "at": self.at,
                "worker": self.name_of(worker),
                "pid": 6200 + worker,
                "exit_code": -9,
                "function": "train_step",
                "last_lines": "allocating 12.4 GB\nallocating 13.1 GB",
            }
        )

    def number(self) -> int:
        self.seq += 1
        return self.seq

    def facts(self, since: int = 0, timeline: bool = False) -> dict[str, Any]:
        self.advance()
        recent = {
            name: [row for row in rows if _number(row) >= since][-2_000:]
            for name, rows in self.rows.items()
        }
        events = recent.pop("timeline")
        self.rows["timeline"] = self.rows["timeline"][-20_000:]
        functions = [self.function(name, mean_s) for name, mean_s in FUNCTIONS]
        return {
            "version": 1,
            "at": self.at,
            "uptime_s": self.uptime_s,
            "address": "127.0.0.1:5050",
            "pid": self.pid,
            "host": "node-0",
            "rss_bytes": 81_300_000,
            "queued": 132,
            "relayed": 0,
            "dropped": {},
            "refused_handshakes": 1,
            "scaling": None,
            "totals": {
                "submitted": sum(self.done.values()) + 140,
                "done": sum(self.done.values()),
                "failed": sum(self.failed.values()),
                "cancelled": 3,
                "lost_starts": 1,
                "retried": 2,
            },
            "workers": [self.worker(index) for index in range(self.workers)],
            "functions": sorted(functions, key=lambda row: -row["sum_s"]),
            "waiting": [
                {"coordinator": 9, "count": 120, "reason": "all_busy", "detail": ""},
                {
                    "coordinator": 9,
                    "count": 12,
                    "reason": "resources",
                    "detail": "each needs gpu 1; no worker has so much: cpu 8",
                },
            ],
            "coordinators": [
                {
                    "coordinator": 9,
                    "name": "program",
                    "host": "laptop",
                    "pid": 991,
                    "queued": 132,
                    "out": 8,
                    "held": 5,
                    "held_bytes": 41_000_000,
                    "submitted": 4000,
                    "finished": 3860,
                    "functions": 5,
                    "waits_for_input": 4,
                }
            ],
            "actors": [self.actor(number) for number in range(3)],
            "demands": [],
            "data": {"workers_enough": 3, "jobs": [self.job()]},
            "variables": [
                {
                    "server": "ps:0",
                    "name": "embedding",
                    "shape": [50_000, 128],
                    "dtype": "float32",
                    "bytes": 25_600_000,
                    "updates": 18_250,
                    "updates_per_s": 220.5,
                    "waits_s": 1.25,
                }
            ],
            "rpc": [
                {
                    "process": "dispatcher",
                    "method": "facts",
                    "count": 320,
                    "failed": 0,
                    "in_flight": 1,
                    "mean_s": 0.0011,
                    "p50_s": 0.0009,
                    "p99_s": 0.004,
                    "max_s": 0.02,
                }
            ],
            "rpc_more": 0,
            "variables_more": 0,
            "losses_count": 1,
            "losses": [
                {
                    "name": "worker:9",
                    "ago_s": 42.0 + self.uptime_s,
                    "exit_code": -9,
                    "reason": "its process ended",
                    "last_lines": "Killed",
                }
            ],
            **recent,
            "next": self.seq + 1,
            **({"timeline": {"dropped": 0, "events": events}} if timeline else {}),
        }

    def function(self, name: str, mean_s: float) -> dict[str, Any]:
        return {
            "name": NASTY if self.nasty and name == "evaluate" else name,
            "count": self.done[name] + self.failed[name],
            "failed": self.failed[name],
            "running": 2,
            "queued": 24,
            "mean_s": mean_s,
            "sum_s": mean_s * (self.done[name] + self.failed[name]),
            "p50_s": mean_s * 0.7,
            "p99_s": mean_s * 4.6,
            "max_s": mean_s * 7.1,
            "cpu_s": mean_s * self.done[name] * 0.8,
            "bytes_in": self.done[name] * 20_480,
            "bytes_out": self.done[name] * 512,
        }

    def worker(self, index: int) -> dict[str, Any]:
        slots = [
            {
                "slot": slot,
                "pid": 5100 + index * 16 + slot,
                "state": "running" if (index + slot) % 5 else "idle",
                "function": FUNCTIONS[(index + slot) % 5][0] if (index + slot) % 5 else "",
                "coordinator": 9,
                "work": 77 + slot,
                "attempt": 1,
                "since_s": 754.0 if index == slot == 1 else 0.4 * slot + 0.1,
                "rss_bytes": 120_000_000 + 9_000_000 * index,
                "cpu_percent": 97.0 - index % 7 * 9,
            }
            for slot in range(self.slots)
        ]
        running = sum(slot["state"] == "running" for slot in slots)
        return {
            "name": self.name_of(index),
            "state": "alive",
            "host": f"node-{index // 8}",
            "pid": 5000 + index,
            "slots": self.slots,
            "threads_per_slot": 1,
            "running": running,
            "leases": running + 2,
            "done": sum(self.done.values()) // self.workers,
            "failed": sum(self.failed.values()) // self.workers,
            "rate": 5.2,
            "idle_s": 0.2,
            "resources": {},
            "actors_max": 16,
            "cpu_percent": sum(slot["cpu_percent"] for slot in slots),
            "rss_bytes": sum(slot["rss_bytes"] for slot in slots),
            "host_memory_bytes": 16 * 2**30,
            "host_memory_free_bytes": 9 * 2**30,
            "kept_bytes": 4_000_000 * index,
            "shm_bytes": 1_000_000,
            "bytes_in": 52_000_000,
            "bytes_out": 3_100_000,
            "slot_deaths": sum(
                row["worker"] == self.name_of(index) for row in self.rows["slot_deaths"]
            ),
            "slots_now": slots,
        }

    def actor(self, number: int) -> dict[str, Any]:
        return {
            "actor": number,
            "name": f"counter-{number}",
            "cls": "Counter",
            "state": "alive",
            "worker": f"worker:{number}",
            "restarts": 3,
            "restarts_left": 2,
            "reason": "",
            "calls": 5_120,
            "failed": 0,
            "waiting": 3,
            "calls_per_s": 41.0,
            "p50_s": 0.0021,
            "p99_s": 0.011,
            "rss_bytes": 64_000_000,
            "cpu_percent": 12.0,
        }

    def job(self) -> dict[str, Any]:
        return {
            "job": "train",
            "mode": 1,
            "iteration": 3,
            "tasks": 4,
            "tasks_count": 4,
            "clients": 2,
            "elements_per_s": 5_120.0,
            "bytes_per_s": 33_000_000.0,
            "buffered": 48,
            "room": 64,
            "positions_left": [12_000],
            "waits": "producer",
            "workers_wait": 0.75,
            "readers_wait": 0.0,
        }

    def logs(self, worker: str, since: int, wait_s: float) -> Any:
        rows = [
            (seq, self.name_of(seq % self.workers), self.at, "slot 0", 1, text)
            for seq, text in self.logged
            if seq > since and worker in ("", self.name_of(seq % self.workers))
        ]
        last = len(self.logged)
        return {"rows": rows if since > -2 else [], "next": last, "connected": 4, "failed": {}}

    def stack(self, worker: str) -> dict[str, str]:
        return {f"{worker} slot 0": 'File "train.py", line 40 in train_step'}


def _number(row: Any) -> int:
    return int(row["seq"] if isinstance(row, dict) else row[0])
