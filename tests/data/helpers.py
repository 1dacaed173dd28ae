"""Elements of datasets in a form that tests compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from zmqdist.data.structure import is_dataset

COUNT = 12
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


def read(elements: Iterator[Any], count: int = COUNT) -> list[Any]:
    """The next elements; an error stands in the place of its element."""
    elements_read: list[Any] = []
    while len(elements_read) < count:
        try:
            elements_read.append(plain(next(elements)))
        except StopIteration:
            break
        except Exception:
            elements_read.append("an error")
    return elements_read
