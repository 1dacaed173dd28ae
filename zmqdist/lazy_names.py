"""Names of a package that are imported at their first use, so that importing the package is fast,
and packages that need each other's names make no import cycle.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collection() -> Iterator[None]:
    """Return a context manager in which the garbage collector does not run. Imports make little
    garbage, and would spend a tenth of their time in the collector.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


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
