"""Functions that cut an iteration into portions, and that change the portions as a record says. The
state of the portions is one row, `records.PortionsEntry`.

Theory
    A portion is a run of positions of one repetition of the only source. Portions are numbered 0,
    1, 2, ... in the order of the data. The length of a portion depends on the dataset alone, so
    that the number of workers changes neither the order of the elements nor the share of each
    consumer.

    With consumers, portion `n` is step `n // consumers` of lane `n % consumers`. Without consumers
    there is one lane. A client reads one lane. The finished steps of a lane are stored as runs,
    because a client that reads its lane alone finishes steps almost in order, and so there are few
    runs.

Not here: the choice of the worker and client that get a portion (portions.py).
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import Final, TypeAlias

from zmqdist.data.service.dispatcher.machine import records as r
from zmqdist.data.service.dispatcher.machine import runs as sets
from zmqdist.data.service.dispatcher.machine.runs import Runs

PORTIONS_WANTED: Final = 256
LENGTH_MAX: Final = 1024
"""The largest number of positions in a portion, unless the grain is larger. With longer portions,
more work would have to be done again after the loss of a worker."""

ENDLESS_LENGTH: Final = 256

Change: TypeAlias = (
    r.GivePortions
    | r.Acknowledge
    | r.LosePortions
    | r.FailPortions
    | r.TakeOver
    | r.RestoreSaved
    | r.SkipSaved
    | r.RevokeDeath
)


def cut(positions: int, repetitions: int, grain: int, lanes: int) -> r.PortionsEntry:
    """Return the row for the portions of a new iteration. The length of a portion is a multiple of
    `grain`."""
    wanted = (
        ENDLESS_LENGTH if positions == r.INFINITE else min(LENGTH_MAX, positions // PORTIONS_WANTED)
    )
    length = max(1, wanted // grain) * grain
    return r.PortionsEntry(positions, repetitions, length, [0] * lanes, [[] for _ in range(lanes)])


# -- numbers ---------------------------------------------------------------------------------------


def total(portions: r.PortionsEntry) -> float:
    """Return the number of portions; `inf` if the data has no end."""
    if 0 in (portions.positions, portions.repetitions):
        return 0
    if r.INFINITE in (portions.positions, portions.repetitions):
        return inf
    return _in_repetition(portions) * portions.repetitions


def _in_repetition(portions: r.PortionsEntry) -> int:
    return -(-portions.positions // portions.length)


def place_of(portions: r.PortionsEntry, number: int) -> tuple[int, int, int]:
    """Return (repetition, first position, number of positions) of a portion."""
    if portions.positions == r.INFINITE:
        return 0, number * portions.length, portions.length
    repetition, within = divmod(number, _in_repetition(portions))
    start = within * portions.length
    return repetition, start, min(portions.length, portions.positions - start)


def positions_left(portions: r.PortionsEntry) -> int | None:
    """Return how many positions have not been given out yet; None if the data has no end."""
    last = total(portions)
    if last in (0, inf):
        return None if last else 0
    lanes, count = len(portions.next), _in_repetition(portions)

    def size(lane: int, start: int, end: int) -> int:
        """Return the number of positions in a run of steps."""
        # The last portion of a repetition may be shorter. It is in the same lane again after
        # `lanes` repetitions, which are `count` steps.
        shorter = (
            tail // lanes for tail in range(count - 1, count * lanes, count) if tail % lanes == lane
        )
        cut_off = sum(
            len(range(step, end, count)) - len(range(step, start, count)) for step in shorter
        )
        return (end - start) * portions.length - cut_off * (
            count * portions.length - portions.positions
        )

    left = 0
    for lane, step in enumerate(portions.next):
        left += size(lane, step, max(step, len(range(lane, int(last), lanes))))
        left -= sum(
            size(lane, max(start, step), end) for start, end in portions.skip[lane] if end > step
        )
    return left


def lane_of(portions: r.PortionsEntry, client: r.ClientEntry) -> int:
    return max(0, client.consumer) % len(portions.next)


def first_open(portions: r.PortionsEntry, lane: int) -> int:
    """Return the number of the first portion of a lane that is not done."""
    lanes = len(portions.next)
    mine = (number for number in portions.open if number % lanes == lane)
    return min(mine, default=portions.next[lane] * lanes + lane)


def is_lane_over(portions: r.PortionsEntry, lane: int) -> bool:
    """Return whether all portions of a lane are acknowledged as done."""
    return first_open(portions, lane) >= total(portions)


def is_over(portions: r.PortionsEntry) -> bool:
    return all(is_lane_over(portions, lane) for lane in range(len(portions.next)))


# -- changes ---------------------------------------------------------------------------------------


def give(
    portions: r.PortionsEntry, client: int, incarnation: int, request: int, numbers: list[int]
) -> None:
    """Give portions to a worker. The worker asks for more only after it has computed all portions
    that it had for this client, so its death is not charged to these any more.
    """
    for portion in portions.open.values():
        if portion.client == client and incarnation in portion.missed:
            portion.missed.remove(incarnation)
    for number in numbers:
        known = portions.open.setdefault(number, r.Portion(client))
        known.pass_to(client, incarnation, request)
        step, lane = divmod(number, len(portions.next))
        if step == portions.next[lane]:
            portions.next[lane] = step + 1
            _advance(portions, lane)


def _advance(portions: r.PortionsEntry, lane: int) -> None:
    """Move the next step of a lane past the steps in `skip`, which are not given out as new
    portions."""
    while (end := sets.end_of(portions.skip[lane], portions.next[lane])) is not None:
        portions.next[lane] = end


def acknowledge(portions: r.PortionsEntry, client: int, marks: list[tuple[int, int, bool]]) -> None:
    for number, elements, done in marks:
        portion = portions.open.get(number)
        if portion is None or portion.client != client:
            continue
        portion.acked = max(portion.acked, elements)
        if done:
            _finish(portions, client, number)


def _finish(portions: r.PortionsEntry, client: int, number: int) -> None:
    del portions.open[number]
    step = number // len(portions.next)
    sets.add(portions.done.setdefault(client, []), step, step + 1)


def lose(
    portions: r.PortionsEntry, incarnation: int, client: int, died: str, crashed: bool
) -> None:
    """Free the portions that an incarnation of a worker was computing. `died` names the worker or
    process whose death is charged to each of these portions. It is "" if no death is charged.

    With a client, a reader has reported that a reply of the worker was lost. The reader may do so
    before the dispatcher learns that the worker has died. When the dispatcher learns of the death,
    the portions of that reply are therefore charged as well, although they are free by then, or
    other workers compute them.
    """
    for portion in portions.open.values():
        was_computed = portion.incarnation == incarnation and client in (0, portion.client)
        if was_computed:
            portion.pass_to(portion.client)
        if client:
            if was_computed and incarnation not in portion.missed:
                portion.missed.append(incarnation)
            continue
        if incarnation in portion.missed:
            portion.missed.remove(incarnation)
        elif not was_computed:
            continue
        if died and crashed:
            portion.deaths.append(died)
        elif died:
            portion.lost[incarnation] = died


def leave(portions: r.PortionsEntry, client: int) -> None:
    """Make the unfinished portions of a client free for other clients."""
    for number, portion in portions.open.items():
        if portion.client == client:
            portion.pass_to(0)
            if portion.acked:
                portions.left.setdefault(client, []).append((number, portion.acked))


def take_over(portions: r.PortionsEntry, client: int, old: int) -> None:
    for table in (portions.done, portions.left):
        if old in table:
            table[client] = table.pop(old)
    portions.readers.pop(old, None)
    for portion in portions.open.values():
        if portion.client == old:
            portion.pass_to(client)


def restore_saved(
    portions: r.PortionsEntry, client: r.ClientEntry, done: Runs, open_: list[tuple[int, int]]
) -> None:
    """Set a client back to its saved state. The portions that it acknowledged after the state was
    saved become open again, without the elements that another client had acknowledged before.
    """
    lanes, lane = len(portions.next), lane_of(portions, client)
    left = dict(portions.left.pop(client.id, []))
    elements = dict(open_)
    for number, acked in chain(*portions.left.values()):
        elements[number] = max(acked, elements.get(number, 0))
    had = portions.done.pop(client.id, [])
    since = sets.without(had, done)
    kept = portions.done[client.id] = sets.without(had, since)
    for step in sets.members(since):
        number = step * lanes + lane
        portions.open[number] = r.Portion(client.id, acked=elements.get(number, 0))
    for number, portion in list(portions.open.items()):
        if portion.client != client.id and (portion.client or number not in left):
            continue
        step = number // lanes
        if sets.end_of(done, step) is not None:
            del portions.open[number]
            sets.add(kept, step, step + 1)
        else:
            portions.open[number] = r.Portion(client.id, acked=elements.get(number, 0))
    portions.failed = ""


def skip_saved(
    portions: r.PortionsEntry, client: r.ClientEntry, done: Runs, open_: list[tuple[int, int]]
) -> None:
    """Have a client continue from a saved state of another iteration: skip the portions that are
    finished in that state, and give the client those that are unfinished in it. Do not change
    portions of other clients.
    """
    lanes, lane = len(portions.next), lane_of(portions, client)
    begun = portions.next[lane]
    mine = portions.done.setdefault(client.id, [])
    for start, stop in done:
        sets.add(mine, max(start, begun), stop)
        sets.add(portions.skip[lane], start, stop)
    for number, portion in list(portions.open.items()):
        step = number // lanes
        if number % lanes == lane and not portion.client and sets.end_of(done, step) is not None:
            del portions.open[number]
            sets.add(mine, step, step + 1)
    for number, elements in open_:
        step = number // lanes
        known = portions.open.get(number)
        if (known is None and step >= begun) or (known is not None and not known.client):
            portions.open[number] = r.Portion(
                client.id, acked=max(elements, known.acked if known else 0)
            )
            sets.add(portions.skip[lane], step, step + 1)
    _advance(portions, lane)
