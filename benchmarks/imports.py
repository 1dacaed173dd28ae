"""What does `import zmqdist` cost beyond NumPy, and what does everything that a program with a coordinator imports?

Each import has a Python of its own, timed inside it; NumPy is imported first and not counted.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from zmqdist.observe.bench import Figure, Plan, p99

PROGRAM = "import numpy, time; start = time.perf_counter(); import {what}; print(time.perf_counter() - start)"
NUMPY = "import time; start = time.perf_counter(); import numpy; print(time.perf_counter() - start)"


def measure(plan: Plan) -> list[Figure]:
    """The time of each import, beside that of NumPy in the same run."""
    names = ("zmqdist", "zmqdist.coordinator")
    took: dict[str, list[float]] = {name: [] for name in ("numpy", *names)}
    for _ in range(plan.blocks + 1):  # the first one warms the disk's cache
        took["numpy"].append(_run(NUMPY))
        for name in names:
            took[name].append(_run(PROGRAM.format(what=name)))
    figures = []
    numpy = median(took["numpy"][1:])
    for name in names:
        mine = took[name][1:]
        figures.append(
            Figure(
                f"import {name} after numpy",
                "s",
                median(mine),
                p99(mine),
                "import numpy",
                numpy,
                None,
                median(mine) / numpy,
            )
        )
    return figures


def _run(program: str) -> float:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)
