"""Cut a list of items into messages that are neither too many nor too large."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, TypeVar

from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX

T = TypeVar("T", bound=tuple[Any, ...])


def split(items: list[T], field: int = -1) -> Iterator[list[T]]:
    """Parts of at most BATCH_ITEMS_MAX items and about BATCH_BYTES_MAX payload bytes, in order.

    The payload is one field of an item, mostly the last; an item whose payload alone is larger than the bound is a part of its own.
    Errors, pickled functions and last log lines can be that large together, so that few items are no proof of a small message.
    """
    if len(items) == 1:
        yield items
        return
    payload_of = itemgetter(field)
    for start in range(0, len(items), BATCH_ITEMS_MAX):
        part = items[start : start + BATCH_ITEMS_MAX]
        if sum(map(len, map(payload_of, part))) <= BATCH_BYTES_MAX:
            yield part
        else:
            yield from _by_bytes(part, field)


def _by_bytes(items: list[T], field: int) -> Iterator[list[T]]:
    start = size = 0
    for end, item in enumerate(items):
        payload = len(item[field])
        if end > start and size + payload > BATCH_BYTES_MAX:
            yield items[start:end]
            start, size = end, 0
        size += payload
    yield items[start:]
