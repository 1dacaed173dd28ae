"""How many rows a second do two workers read from a table at two parameter servers, and add to?

A row has 64 numbers of 4 bytes. Each task reads a number of random rows, and adds to them. It waits
for the end of both steps.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{rows:,} a task", {"rows": rows}) for rows in (100, 4000)]


QUESTION = Question(
    "ps_rows",
    "Rows read from and added to a table at 2 parameter servers",
    "rows/s",
    cases=cases,
    count=10,
)
