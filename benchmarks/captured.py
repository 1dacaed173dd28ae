"""How many tasks a second does a system run if each task is a method of an object with a large
array?

The object is the same for all tasks, and each system gets the tasks in one call of its `map`.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    size = plan.fanout_bytes // 8
    return [Case(f"{size / 2**20:g} MiB", {"size": size})]


QUESTION = Question(
    "captured", "Tasks whose function holds a large array", "tasks/s", cases=cases, count=4
)
