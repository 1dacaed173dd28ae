"""The modules that one scheduled function passes through, in all processes:
`python -m benchmarks.function_path`.

A profiler is set in each thread of the dispatcher, the worker and the coordinator, which are in one
process here, and in the slot's process. A pass lasts from one run of the function to the next. The
modules of every pass are counted, so that a heartbeat does not count.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PASSES = 20

modules: set[str] = set()
"""The files of the package that this process has entered in the present pass."""


def record(frame: FrameType, event: str, arg: Any) -> None:
    """Record the file of a function that is called. The interpreter calls this."""
    if event == "call":
        modules.add(frame.f_code.co_filename)


def taken() -> set[str]:
    """Return the modules of the pass that ends now, as paths in the package."""
    paths = {*modules}
    modules.clear()
    return {path.rpartition("/zmqdist/")[2] for path in paths if "/zmqdist/" in path}


def in_slot() -> set[str]:
    """Return the modules that the slot has entered since the last call. A worker runs this."""
    from benchmarks import function_path

    sys.setprofile(function_path.record)
    return function_path.taken()


def function_path() -> set[str]:
    """Return the modules that each of PASSES scheduled functions has passed through."""
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        import zmqdist as zd

        with (
            zd.DispatchServer() as dispatcher,
            zd.WorkerServer(dispatcher_address=dispatcher.target, slots=1),
            zd.ClusterCoordinator(dispatcher) as coordinator,
        ):
            for _ in range(5):
                coordinator.submit(in_slot).result(20)
            taken()
            passes = []
            for _ in range(PASSES):
                slot = coordinator.submit(in_slot).result(20)
                passes.append(slot | taken())
        return set.intersection(*passes)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


if __name__ == "__main__":
    from benchmarks import function_path as this

    paths = sorted(this.function_path())
    print("\n".join(paths))
    print(f"{len(paths)} modules of {len(list(Path('zmqdist').rglob('*.py')))}")
