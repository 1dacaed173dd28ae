"""How long does a blocking call with a small argument take, from one process to another of the same
host?"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("latency", "Blocking call, small argument", "us", 1e6, count=20, each=True)
