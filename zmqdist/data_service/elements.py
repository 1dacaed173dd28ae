"""Elements of a pipeline as one value of an RPC answer."""

from __future__ import annotations

from typing import Any


def pack(elements: list[Any]) -> Any:
    return elements


def unpack(value: Any) -> list[Any]:
    return list(value)
