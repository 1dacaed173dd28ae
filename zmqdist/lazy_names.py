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


class _Collector:
    """Switches the garbage collector off while any thread imports.

    Sets the threshold of the youngest generation to zero instead of calling `gc.disable`, so that
    this does not mix with calls of `gc.disable` and `gc.enable` by the program.
    """

    def __init__(self) -> None:
        self._lock = RLock()  # a signal handler may import while its thread holds the lock
        self._users = 0
        self._threshold = 0

    def switch_off(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._threshold = gc.get_threshold()[0]
                gc.set_threshold(0)

    def release(self) -> None:
        with self._lock:
            if self._users == 1 and gc.get_threshold()[0] == 0:
                gc.set_threshold(self._threshold)
            # already zero if this thread has forked meanwhile, and this is the child
            self._users = max(0, self._users - 1)

    def forked(self) -> None:
        """Switch the collector on in a forked child, which does not have the importing threads."""
        self._lock = RLock()
        self._users = min(1, self._users)
        self.release()


_collector = _Collector()
if sys.platform != "win32":
    # not by zmqdist.platforms, which would make the import of the package slower
    os.register_at_fork(after_in_child=_collector.forked)  # noqa: TID251


@contextmanager
def without_collection() -> Iterator[None]:
    """Return a context manager in which the garbage collector does not run. Imports make little
    garbage, and would spend a tenth of their time in the collector.
    """
    try:
        _collector.switch_off()
        yield
    finally:
        _collector.release()


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
