"""How many calls a second does a server answer when many calls are in flight at the same time?"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{window} on the way", {"window": window}) for window in plan.windows]


QUESTION = Question("calls", "Calls, many on the way", "calls/s", cases=cases, count=500)
