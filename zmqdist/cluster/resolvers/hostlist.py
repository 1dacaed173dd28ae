"""Slurm's short notation for many hosts, or many numbers.

    hosts     n1,n[1-3,7],n[0001-0003]-ib,rack[1-2]n[1-4]      a list of hosts; each [...] means one host for each of its numbers
    tasks     3(x2),2,1                                        3, 3, 2, 1

If a host has several brackets, the number in the last bracket varies fastest. Order and leading
zeros are kept. If a text does not follow this grammar, the functions raise a ValueError that quotes
the text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

from zmqdist import limits

_T = TypeVar("_T")

_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list: `["n1", "n2", "m5", "o3", "o4"]` for `"n[1-2],m5,o[3-4]"`.

    Raises:
      ValueError: the text is not a host list, or has more than `limits.WORKERS_MAX` hosts.
    """
    hosts: list[str] = []
    for text in _split(hostlist):
        hosts += _bounded(_hosts(text, hostlist), len(hosts), hostlist)
    return hosts


def expand_tasks_per_node(tasks: str) -> list[int]:
    """Return the number of tasks on each node: `[3, 3, 2, 1]` for `"3(x2),2,1"`.

    Raises:
      ValueError: the text has another form, or more than `limits.WORKERS_MAX` nodes.
    """
    counts: list[int] = []
    for text in tasks.split(","):
        match = _REPEATED.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{tasks!r} is no list of tasks per node: {text!r} is not of the form 3 or 3(x2)"
            )
        count, times = int(match[1]), int(match[2] or 1)
        counts += _bounded(itertools.repeat(count, times), len(counts), tasks)
    return counts


def _split(hostlist: str) -> Iterator[str]:
    """Yield the parts of a list that are separated by commas outside of brackets."""
    position = 0
    while True:
        match = _HOST.match(hostlist, position)
        if match is None:
            rest = hostlist[position:]
            raise ValueError(
                f"{hostlist!r} is no host list: expected a host at {rest!r}, with brackets in pairs"
            )
        yield match[0]
        position = match.end()
        if position == len(hostlist):
            return
        if hostlist[position] != ",":
            raise ValueError(
                f"{hostlist!r} is no host list: {hostlist[position:]!r} does not belong there"
            )
        position += 1


def _hosts(text: str, hostlist: str) -> Iterator[str]:
    choices = [
        [piece[2]] if piece[1] is None else _numbers(piece[1], hostlist)
        for piece in _PIECE.finditer(text)
    ]
    return map("".join, itertools.product(*choices))


def _numbers(inside: str, hostlist: str) -> list[str]:
    """Return the numbers in a bracket, as text: 1, 2, 3, 07 for `1-3,07`."""
    texts: list[str] = []
    for text in inside.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"{hostlist!r} is no host list: {text!r} is not of the form 3 or 1-3")
        first, last = match[1], match[2] or match[1]
        if int(first) > int(last):
            raise ValueError(f"{hostlist!r} is no host list: the range {text} is empty")
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        texts += _bounded(numbers, len(texts), hostlist)
    return texts


def _bounded(items: Iterable[_T], before: int, text: str) -> list[_T]:
    """Return the items as a list. Raise ValueError if the text describes more than WORKERS_MAX
    items, because a short text can describe billions of them.

    Args:
      before: the number of items that were found earlier in `text`.
    """
    room = limits.WORKERS_MAX - before
    head = list(itertools.islice(items, room + 1))
    if len(head) > room:
        raise ValueError(f"{text!r} stands for more than {limits.WORKERS_MAX} nodes")
    return head
