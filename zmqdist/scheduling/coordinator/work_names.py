"""The names of a program's work, for drain reports (scheduling/dispatcher/drain_report.py)."""

from __future__ import annotations

from collections.abc import Mapping

from zmqdist.limits import DESCRIBED_WORKS_MAX
from zmqdist.messages import KEPT, DescribeWork, WorkDescribed
from zmqdist.scheduling.coordinator.work import Work


def described(
    question: DescribeWork, works: Mapping[int, Work], resources: list[str]
) -> WorkDescribed:
    """Return the reply to a DescribeWork, with names such as "sum-12": function and work number.
    Work that the program no longer needs is left out."""
    items: list[tuple[int, str, bool]] = []
    for number in question.works[:DESCRIBED_WORKS_MAX]:
        work = works.get(number)
        if work is not None and work.alive is not None:
            lineage = work.kind == KEPT and work.outcome.lineage
            items.append((number, label(work.name, number), lineage))
    return WorkDescribed(question.request, items, resources)


def label(name: str, work: int) -> str:
    """Return a short name for reports, such as "sum-12": the function's name without its module, or
    the `name` of its options, and the number of the work item.
    """
    parts = name.split(".")
    dotted = all(part.isidentifier() or part[:1] == "<" for part in parts)
    return f"{parts[-1] if dotted else name}-{work}"
