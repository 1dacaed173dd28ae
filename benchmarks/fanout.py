"""How many tasks a second does a system run if all of them get the same large array?

Each system passes the array as its documentation recommends. A system with a store for shared data
puts the array into the store once in each block, and the time for this counts.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{plan.fanout_bytes / 2**20:g} MiB", {"size": plan.fanout_bytes})]


QUESTION = Question(
    "fanout", "Tasks that are given one large array", "tasks/s", cases=cases, count=4
)
