"""How many calls of one actor a second are answered when many calls are in flight at the same
time?"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    window = min(2000, plan.count_max)
    return [Case(f"{window} on the way", {"window": window})]


QUESTION = Question(
    "actors", "Calls of an actor, many on the way", "calls/s", cases=cases, count=2000
)
