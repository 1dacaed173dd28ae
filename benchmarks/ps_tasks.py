"""How many tasks a second does a cluster of two workers run if each task adds to a variable at a
parameter server?"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question(
    "ps_tasks", "Tasks that add to a variable at a parameter server", "tasks/s", count=50
)
