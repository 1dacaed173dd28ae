"""The modules that the children of a worker run; its zygote (process/zygote.py) starts with them."""

from __future__ import annotations

import importlib

SLOT = "zmqdist.scheduling.worker.slot_main"
"""Runs functions."""

TASK = "zmqdist.data.service.worker.task_main"
"""Reads a pipeline of the data service."""

STREAM = "zmqdist.data.service.snapshots.stream_process"
"""Writes a pipeline into a snapshot."""

MODULES = (SLOT, TASK, STREAM)


def import_modules() -> None:
    """Before the zygote is forked off, so that all children share them. The worker itself needs none of them."""
    for module in MODULES:
        importlib.import_module(module)
