"""How many small elements a second does a pipeline deliver if two workers compute it for one
reader?

The element is a number of eight bytes. The reader takes single numbers, or batches that the workers
make. A system whose reader takes single numbers may still send several numbers in one message. The
tf.data service does not compress.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    thousand = min(1000, plan.count_max)
    return [
        Case("one at a time", {"batch": 1}),
        Case(f"in batches of {thousand:,}", {"batch": thousand}),
    ]


QUESTION = Question(
    "data_elements",
    "Data: numbers from 2 workers",
    "elements/s",
    cases=cases,
    count=1000,
    longer=4,
    rests=True,
)
