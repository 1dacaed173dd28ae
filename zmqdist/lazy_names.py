"""Names of a package that are imported at their first use, so that importing the package is fast,
and packages that need each other's names make no import cycle.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from _thread import RLock
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_lock = RLock()  # a signal handler may import while its thread holds the lock
_thresholds: list[int] = []
"""The threshold of the collector before each of the imports that run, first the program's own."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Return a context manager in which the garbage collector does not run. Imports make little
    garbage, and would spend a tenth of their time in the collector.

    This sets the threshold of the youngest generation to zero instead of calling `gc.disable`, so
    that it does not mix with calls of `gc.disable` and `gc.enable` by the program.
    """
    with _lock:
        _thresholds.append(gc.get_threshold()[0])
        gc.set_threshold(0)
    try:
        yield
    finally:
        _restore()


def _restore(first: int = -1) -> None:
    """End the last import, or those from `first` on. `_forked` may have ended all already."""
    with _lock:
        # zero until the last import ends, unless the program has set it meanwhile
        if _thresholds and gc.get_threshold()[0] == 0:
            gc.set_threshold(_thresholds[first])
        del _thresholds[first:]


def _forked() -> None:
    """End all imports in a forked child, which does not have their threads."""
    global _lock
    _lock = RLock()
    _restore(0)


# not by zmqdist.platforms, which would make the import of the package slower
getattr(os, "register_at_fork", lambda **_hooks: None)(after_in_child=_forked)


def lazy_names(
    package: str,
    where: Mapping[str, str],
    modules: Collection[str] = (),
    linux_only: Collection[str] = (),
) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a package.

    Args:
      package: the package, such as "zmqdist.data".
      where: the module that defines each name.
      modules: the names that are modules of the package.
      linux_only: the names of `where` whose modules need Linux. Elsewhere they are functions that
        say so.
    """

    def __getattr__(name: str) -> Any:
        if name in linux_only and sys.platform != "linux":
            from zmqdist.platforms import refusing

            value: Any = refusing(f"{package}.{name}")
        elif name in where:
            with without_collection():
                value = getattr(importlib.import_module(where[name]), name)
        elif name in modules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Python calls this function only for names that the package does not have yet.
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
