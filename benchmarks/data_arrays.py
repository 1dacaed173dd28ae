"""How many bytes a second does a pipeline deliver if its elements are large arrays that two workers
compute for one reader?

Each element is a new array, written by one addition.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{plan.element_bytes / 2**20:g} MiB each", {"size": plan.element_bytes})]


QUESTION = Question(
    "data_arrays",
    "Data: arrays from 2 workers",
    "GB/s",
    1e-9,
    cases,
    count=10,
    longer=4,
    rests=True,
)
