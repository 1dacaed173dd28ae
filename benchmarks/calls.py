"""How many calls a second does a server answer when many calls are in flight at the same time?"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    window = min(500, plan.count_max)
    return [Case(f"{window} on the way", {"window": window})]


QUESTION = Question("calls", "Calls, many on the way", "calls/s", cases=cases, count=500)
