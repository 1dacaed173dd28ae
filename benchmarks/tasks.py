"""How many tasks that do nothing are scheduled, run on two worker processes, and fetched in a
second?"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("tasks", "No-op tasks on 2 workers, all results fetched", "tasks/s", count=50)
