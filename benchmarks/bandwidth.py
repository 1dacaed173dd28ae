"""How fast does an array travel to another process of the same host, and back, by size and lane?

The figures are GB/s each way: the array's bytes divided by half of the round-trip time. `memcpy` is
a copy between two warm arrays by one thread; no system that copies the array can be faster.
`zmqdist, sockets only` is zmqdist without shared memory.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(_named(size), {"size": size}) for size in plan.sizes]


def _named(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


QUESTION = Question(
    "bandwidth",
    "Echo of an array, each way",
    "GB/s",
    1e-9,
    cases,
    count=1,
    curve="bytes of the array",
)
