"""How long from the start of Python to the first result on two worker processes?

A whole program, timed from outside: imports, cluster, workers, one function on each, and again until Python has ended.
"""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from zmqdist.observe.bench import Figure, Plan, p99

PROGRAM = """
import zmqdist as zd
with zd.local_cluster(workers=2) as cluster, zd.coordinator.ClusterCoordinator(cluster) as coordinator:
    print(coordinator.schedule(lambda: 42).fetch(), flush=True)
"""
BARE = "import numpy, zmq; print(42, flush=True)"


def measure(plan: Plan) -> list[Figure]:
    """Against a Python that imports NumPy and pyzmq and does nothing with them."""
    _run(PROGRAM)
    pairs = [(_run(PROGRAM), _run(BARE)) for _ in range(plan.blocks)]
    firsts = [mine[0] for mine, _ in pairs]
    ends = [mine[1] for mine, _ in pairs]
    bare = [other[0] for _, other in pairs]
    return [
        Figure(
            "start of Python to first result, 2 workers",
            "s",
            median(firsts),
            p99(firsts),
            "import numpy, zmq",
            median(bare),
            p99(bare),
            median(mine[0] / other[0] for mine, other in pairs),
        ),
        Figure("the same to the end of Python", "s", median(ends), p99(ends)),
    ]


def _run(program: str) -> tuple[float, float]:
    """Seconds to its first line, and to its end."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        first = time.perf_counter() - start
    if line.strip() != "42" or process.returncode:
        raise RuntimeError(f"the program ended with {process.returncode} and said {line!r}")
    return first, time.perf_counter() - start
