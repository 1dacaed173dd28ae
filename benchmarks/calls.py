"""How many calls a second are answered when many are on the way at a time?"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    window = min(500, plan.count_max)
    return [Case(f"{window} on the way", {"window": window})]


QUESTION = Question("calls", "Calls, many on the way", "calls/s", cases=cases, count=500)
