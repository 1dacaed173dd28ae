"""Cut a list of items into messages that are neither too many nor too large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from zmqdist.limits import BATCH_BYTES_MAX, BATCH_ITEMS_MAX

T = TypeVar("T", bound=tuple[Any, ...])


def split(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Parts of at most BATCH_ITEMS_MAX items and about BATCH_BYTES_MAX payload bytes, in order.

    The payload is the last field of an item; one that is larger than the bound alone is a part of its own. Errors and pickled
    functions can be that large, so that few items are no proof of a small message.
    """
    start = size = 0
    for end, item in enumerate(items):
        payload = len(item[-1])
        if end > start and (size + payload > BATCH_BYTES_MAX or end - start >= BATCH_ITEMS_MAX):
            yield items[start:end]
            start, size = end, 0
        size += payload
    if start < len(items):
        yield items[start:]
