"""How long does it take from the start of Python to the first result of a function on two worker
processes?

Another process measures the time, which includes the imports. gRPC and bare pyzmq have no workers
to start.
"""

from __future__ import annotations

from benchmarks.measuring import Question

QUESTION = Question("startup", "Start of Python to the first result on 2 workers", "s", fresh=True)
