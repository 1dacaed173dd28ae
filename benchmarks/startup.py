"""How long from the start of Python to the first result on two worker processes?

Timed from outside, imports included. gRPC and bare pyzmq have no workers to start.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("startup", "Start of Python to the first result on 2 workers", "s", fresh=True)
