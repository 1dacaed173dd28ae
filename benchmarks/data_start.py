"""How long from the start of Python to the first element that one of two workers computed?

Timed from outside: imports, dispatcher, workers, and everything between them.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("data_start", "Data: start of Python to the first element from 2 workers", "s", fresh=True)
