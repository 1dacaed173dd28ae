"""How long does one task take from its scheduling to its result, if the system has no other work?

Bare pyzmq makes one round trip; a task through a dispatcher makes two.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question(
    "roundtrip", "One task, from schedule to its result", "us", 1e6, count=5, each=True
)
