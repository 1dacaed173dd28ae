"""What a dataset gives, as something that can be compared, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zmqdist.data.structure import is_dataset

SOME = 12
"""Enough elements of a dataset that has no end."""


def plain(value: Any) -> Any:
    """An element as something that == compares."""
    if is_dataset(value):
        return ["dataset", *map(plain, value)]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return str(np.asarray(value).dtype), np.asarray(value).tolist()


def read(elements: Iterator[Any], count: int = SOME) -> list[Any]:
    """The next elements; an error stands in the place of its element."""
    found: list[Any] = []
    while len(found) < count:
        try:
            found.append(plain(next(elements)))
        except StopIteration:
            break
        except Exception:
            found.append("an error")
    return found
