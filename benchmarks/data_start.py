"""How long does it take from the start of Python to the first element that one of two workers has
computed?

Another process measures the time, which therefore includes the imports and the start of the
dispatcher and the workers.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question(
    "data_start", "Data: start of Python to the first element from 2 workers", "s", fresh=True
)
