"""Tests that run once more on another cluster: those of a module that use a fixture, which the
importing module gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def again(module: ModuleType, fixture: str) -> dict[str, Callable[..., Any]]:
    """For `globals().update`: they use the fixtures of that name that the other module has."""
    tests = {name: fn for name, fn in vars(module).items() if name.startswith("test_")}
    return {name: fn for name, fn in tests.items() if fixture in inspect.signature(fn).parameters}
