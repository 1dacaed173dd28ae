"""The module zmqdist.rpc.internal_client with some functions replaced, in the place of the real one
in a single module.

Who patches the module itself patches it for every client of the process: a reader that another test
has left asks through it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from zmqdist.rpc import internal_client


def asking_with(**replaced: Callable[..., Any]) -> SimpleNamespace:
    assert replaced.keys() <= vars(internal_client).keys()
    return SimpleNamespace(**{**vars(internal_client), **replaced})
