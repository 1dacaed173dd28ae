"""`zmqdist.data.service` under its name in tf.data, `experimental.service`."""

from __future__ import annotations

from typing import Any

from zmqdist.data import service
from zmqdist.data.service import __all__ as __all__


def __getattr__(name: str) -> Any:
    return getattr(service, name)


def __dir__() -> list[str]:
    return dir(service)
