"""How many threads the libraries under NumPy start in each slot: the cores of the host, divided by the number of its slots.

Without a bound each slot's BLAS starts a thread for each core, so that ten slots on ten cores run a hundred threads. The libraries read
their variables when they are loaded, so the variables must be set when a process that imports NumPy is started.
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
    """Return the threads of each slot if this host has `slots` slots: the cores divided by the slots, at least 1."""
    return max(1, cores() // max(1, slots))


def thread_variables(threads: int | None, slots: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that slots need in addition to `environment`.

    Args:
      threads: the threads of each slot, if the user has set them. None: the share of each slot; but if `environment` has one of the
        variables, no other is added, because the user has set that one.
      slots: the number of slots of all workers on this host.
    """
    if threads is None:
        if any(name in environment for name in VARIABLES):
            return {}
        threads = share(slots)
    return dict.fromkeys(VARIABLES, str(threads))


def threads_in(environment: Mapping[str, str]) -> int:
    """Return the threads of a slot that starts with this environment; 0 if its variables have no number, or different numbers."""
    said = {environment[name] for name in VARIABLES if name in environment}
    (number, *others) = said or {""}
    return int(number) if not others and number.isdecimal() else 0
