"""How fast does a worker read a model from two parameter servers, and add to all of its numbers?

The worker reads the model, multiplies it, and sends the product to the servers, which add it. The
bytes in both directions count.
"""

from __future__ import annotations

from benchmarks.measuring import Case, Plan, Question


def cases(plan: Plan) -> list[Case]:
    return [Case(f"{plan.model_bytes / 2**20:g} MiB", {"size": plan.model_bytes})]


QUESTION = Question(
    "ps_model",
    "A model read from and added to at 2 parameter servers",
    "GB/s",
    1e-9,
    cases,
    count=2,
    longer=8,
)
