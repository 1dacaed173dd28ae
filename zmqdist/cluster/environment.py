"""The environment variables that tell a process which cluster it belongs to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CONFIG_ENV: Final = "ZMQDIST_CONFIG"
"""The variable with the path of a cluster file, or with JSON in the form of TF_CONFIG."""

TF_CONFIG_ENV: Final = "TF_CONFIG"
"""The variable with JSON: {"cluster": {job: addresses}, "task": {"type": job, "index": number}, "rpc_layer": ..., "session_master":
...}.
"""


def is_json(text: str) -> bool:
    """Return whether the value of CONFIG_ENV is JSON rather than a path."""
    return text.lstrip().startswith("{")


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Return a context manager in which an environment variable of this process has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
