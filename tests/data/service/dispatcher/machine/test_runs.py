"""Runs of numbers are sets."""

from __future__ import annotations

import random
from itertools import pairwise

from zmqdist.data.service.dispatcher.machine import runs as sets


def test_runs_are_sets() -> None:
    chance = random.Random(5)
    for _ in range(300):
        runs: sets.Runs = []
        other: sets.Runs = []
        wanted: dict[int, set[int]] = {0: set(), 1: set()}
        for _ in range(chance.randrange(8)):
            which = chance.randrange(2)
            start = chance.randrange(20)
            stop = start + chance.randrange(5)
            sets.add((runs, other)[which], start, stop)
            wanted[which] |= set(range(start, stop))
        assert list(sets.members(runs)) == sorted(wanted[0])
        assert all(one[1] < two[0] for one, two in pairwise(runs))
        assert list(sets.members(sets.without(runs, other))) == sorted(wanted[0] - wanted[1])
        assert {n for n in range(30) if sets.end_of(runs, n) is not None} == wanted[0]
