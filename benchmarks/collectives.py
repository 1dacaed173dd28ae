"""How fast do four processes of this host reduce a large array together, and a small array?

The speed of a ring is the number of bytes that each member sends in a second; for each all_reduce a
member sends 2 (n - 1) / n times the bytes of the array. For comparison, plain TCP sockets move the
same bytes and add no numbers, in blocks that take turns with zmqdist: once in a ring of all
members, which send at the same time, and once between a single pair of members.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from benchmarks.measuring import Figure, Plan, Question
from zmqdist.launch.ports import Reserved
from zmqdist.observe.bench import p99

MEMBERS: Final = 4
SMALL_BYTES: Final = 1024


class Ring:
    """Four processes that carry out the same operations at the same time (ring_member.py)."""

    def __init__(self, stack: ExitStack) -> None:
        # The ports are reserved, so that no other process gets them before the members bind them.
        ports = [Reserved() for _ in range(2 * MEMBERS)]
        for port in ports:
            stack.callback(port.close)
        addresses = [port.address for port in ports]
        self._members = []
        for rank in range(MEMBERS):
            command = [sys.executable, "-m", "benchmarks.ring_member", str(rank), *addresses]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            self._members.append(process)
        for process in self._members:
            self._line(process)

    def ask(self, what: str, nbytes: int, count: int) -> list[list[float]]:
        """Have all members do `what` `count` times with `nbytes`. Return, for each member, the
        seconds of each of its pieces of work."""
        for process in self._members:
            assert process.stdin is not None
            process.stdin.write(json.dumps([what, nbytes, count]) + "\n")
            process.stdin.flush()
        return [self._line(process) for process in self._members]

    def _line(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("a member of the ring has ended")
        return json.loads(line)


def measure(plan: Plan) -> list[Figure]:
    """Return all figures."""
    with ExitStack() as stack:
        ring = Ring(stack)
        nbytes = plan.ring_bytes
        moved = 2 * (MEMBERS - 1) / MEMBERS * nbytes
        each = max(1, min(8, plan.count_max))
        ways = ("all_reduce", "sockets", "pair")
        for way in ways:
            ring.ask(way, nbytes, 1)
        blocks = [
            {way: _speed(ring, way, nbytes, moved, each) for way in ways}
            for _ in range(plan.blocks)
        ]
        small = [
            time
            for _ in range(plan.blocks)
            for time in ring.ask("all_reduce", SMALL_BYTES, max(1, min(200, plan.count_max)))[0]
        ]
    size = f"{nbytes / 2**20:g} MiB, {MEMBERS} processes"

    def figure(system: str, way: str) -> Figure:
        ratio = (
            None
            if way == "all_reduce"
            else median(block["all_reduce"] / block[way] for block in blocks)
        )
        return Figure(
            "collectives",
            f"sent by each member, {size}",
            system,
            "GB/s",
            median(block[way] for block in blocks),
            ratio=ratio,
        )

    return [
        figure("zmqdist, all_reduce", "all_reduce"),
        figure("plain TCP, the same ring", "sockets"),
        figure("plain TCP, one pair alone", "pair"),
        Figure(
            "collectives",
            f"all_reduce of {SMALL_BYTES} bytes, {MEMBERS} processes",
            "zmqdist",
            "us",
            1e6 * median(small),
            1e6 * p99(small),
        ),
    ]


QUESTION = Question("collectives", "Collectives of four processes", "", own=measure)


def _speed(ring: Ring, way: str, nbytes: int, moved: float, count: int) -> float:
    """Return the GB/s that each member sends, computed from the times of the slowest member."""
    slowest = max(sum(times) for times in ring.ask(way, nbytes, count) if times)
    return moved * count / slowest / 1e9
