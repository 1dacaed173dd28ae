"""The names of the modules that a worker's child processes run. The worker's zygote (process/zygote.py) imports these modules before it
forks."""

from __future__ import annotations

import importlib

SLOT = "zmqdist.scheduling.worker.slot_main"
"""Runs scheduled functions."""

TASK = "zmqdist.data.service.worker.task_main"
"""Runs a data task of the data service."""

STREAM = "zmqdist.data.service.snapshots.stream_process"
"""Writes one stream of a distributed snapshot."""

MODULES = (SLOT, TASK, STREAM)


def import_modules() -> None:
    """Import the modules. The zygote calls this, so that all child processes share the modules' memory. The worker itself needs none of
    these modules."""
    for module in MODULES:
        importlib.import_module(module)
