"""The kinds of child processes that a worker has, and the module that its template process (process/template.py) starts with."""

from __future__ import annotations

from zmqdist.process import template

SLOT, TASK, STREAM = range(3)
"""Slots run functions, tasks read a pipeline of the data service, streams write one into a snapshot."""


def entries() -> tuple[template.Entry, ...]:
    """Return what the kinds run. Imported before any fork, so that children share it; the worker itself needs none of it."""
    from zmqdist.data.service import task_main
    from zmqdist.data.service.snapshots import stream_process
    from zmqdist.scheduling.worker import slot_main

    return slot_main.main, task_main.main, stream_process.main


def main() -> None:
    """Be a template: FD, its control socket."""
    template.main(entries())
