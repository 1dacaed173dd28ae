"""The names of the modules that a worker's child processes run. The zygote of the worker
(process/zygote.py) imports a module before it forks a child that runs it."""

from __future__ import annotations

import importlib

SLOT = "zmqdist.scheduling.worker.slot_main"
"""The module that runs scheduled functions."""

ACTOR = "zmqdist.scheduling.worker.actor_main"
"""The module that runs an actor."""

TASK = "zmqdist.data.service.worker.task_main"
"""The module that runs a data task of the data service."""

STREAM = "zmqdist.data.service.snapshots.stream"
"""The module that writes one stream of a distributed snapshot."""

MODULES = (SLOT, ACTOR)
"""The modules that the zygote imports at its start. The others import all operators of datasets,
which takes 50 ms, and most workers have no data tasks."""


def import_modules() -> None:
    """Import the modules in MODULES. A process calls this before it forks a worker's zygote or a
    worker, so that all child processes share the memory of these modules."""
    for module in MODULES:
        importlib.import_module(module)
