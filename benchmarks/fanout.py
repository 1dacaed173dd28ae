"""How many tasks a second can be given the same large array?

Each system in the way that its documentation names for it: one that has a place for shared data puts the array there once a block, and that
counts.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{plan.fanout_bytes / 2**20:g} MiB", {"size": plan.fanout_bytes})]


QUESTION = Question("fanout", "Tasks that are given one large array", "tasks/s", cases=cases, count=4)
