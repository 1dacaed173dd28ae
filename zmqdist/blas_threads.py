"""The number of threads that NumPy's BLAS and OpenMP start in each slot: the cores of the host,
divided by the number of its slots.

Without a bound the BLAS of each slot would start a thread for each core, so that ten slots on ten
cores would run a hundred threads. The libraries read their environment variables when they are
loaded. The variables must therefore be set when a process that imports NumPy is started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(slots: int) -> int:
    """Return the number of threads of each slot if this host has `slots` slots. This is the cores
    divided by the slots, and at least 1."""
    return max(1, cores() // max(1, slots))


def thread_variables(
    threads: int | None, slots: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables that slots need in addition to `environment`.

    Args:
      threads: the number of threads of each slot, if the user has set it. None means the share of
        each slot (`share`). If `environment` already has one of the variables, the user has set it,
        and None then adds no variable.
      slots: the number of slots of all workers on this host.
    """
    if threads is None:
        if any(name in environment for name in VARIABLES):
            return {}
        threads = share(slots)
    return dict.fromkeys(VARIABLES, str(threads))


def threads_in(environment: Mapping[str, str]) -> int:
    """Return the number of threads of a slot that starts with this environment. 0 means that the
    variables are unset, are no numbers, or differ.
    """
    texts = {environment[name] for name in VARIABLES if name in environment}
    (number, *more) = texts or {""}
    return int(number) if not more and number.isdecimal() else 0
