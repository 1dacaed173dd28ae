"""The machine of the data service with models of workers and readers around it, in virtual time, with seeded faults.

pytest tests/sim --seed 1234      replays one seed exactly
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zmqdist.core.splits import cutting
from zmqdist.core.splits import questions as q
from zmqdist.core.splits import records as r
from zmqdist.core.splits.book import Book
from zmqdist.core.splits.clients import Clients
from zmqdist.core.splits.commits import Commits
from zmqdist.core.splits.dealing import Dealing
from zmqdist.core.splits.machine import Splits
from zmqdist.core.splits.portions import Portioning
from zmqdist.core.splits.state import State
from zmqdist.core.splits.workers import Workers
from zmqdist.testing import simulate_data_service

SEEDS_MAX = 400

Plant = Callable[[pytest.MonkeyPatch], None]


def test_whatever_goes_wrong_readers_get_what_the_table_says_and_come_to_an_end(seed: int) -> None:
    simulate_data_service(seed)


def test_without_faults_everything_is_exact(seed: int) -> None:
    simulate_data_service(seed, faults=0)


def test_the_same_seed_is_the_same_run() -> None:
    first, second = simulate_data_service(11), simulate_data_service(11)
    assert first.trace == second.trace
    assert [reader.got for reader in first.readers] == [reader.got for reader in second.readers]


def test_the_simulation_meets_what_it_is_about() -> None:
    """A mild simulation would find nothing."""
    sims = [simulate_data_service(seed) for seed in range(60)]
    told = " ".join(line for sim in sims for line in sim.trace)
    for what in (
        "is killed",
        "is back at",
        "loses its connection",
        "is added",
        "dispatcher",
        "reader is killed",
        "journal",
    ):
        assert what in told
    readers = [reader for sim in sims for reader in sim.readers]
    assert {reader.mode for reader in readers} == {r.OFF, r.DYNAMIC}
    assert sum(reader.error != 0 for reader in readers) > 1, "states are lost"
    assert sum(sim.answers_lost for sim in sims) > 20
    partly = [
        sim for sim in sims for reader in sim.readers if reader.mode == r.DYNAMIC and 0 < len(reader.got) < sim.count
    ]
    assert len(partly) > 10


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """`make` gets the method and gives another."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def deaf(_method: Any) -> Any:
    return lambda *args, **kwargs: None


def standing_still(give: Any) -> Any:
    def spoiled(self: State, record: r.GiveSplits) -> None:
        give(self, record)
        if record.task in self.tasks:
            cursor = self.iterations[self.tasks[record.task].iteration].cursors[record.source]
            if cursor.position > 20:
                cursor.position -= 1

    return spoiled


def forgetful(splits: Any) -> Any:
    def spoiled(self: Dealing, asked: q.Splits) -> None:
        task = self._book.state.tasks.get(asked.task)
        if task is not None:
            task.given.clear()
        splits(self, asked)

    return spoiled


def hasty(flush: Any) -> Any:
    def spoiled(self: Commits) -> list[q.Effect]:
        answers = [each for each in self._effects if isinstance(each, q.Answer)]
        self._effects = [each for each in self._effects if not isinstance(each, q.Answer)]
        return [*answers, *flush(self)]

    return spoiled


def careless(failed: Any) -> Any:
    return lambda self, code, message: [each for each in failed(self, code, message) if not isinstance(each, q.Reload)]


def unrecorded(kind: type) -> Callable[[Any], Any]:
    def make(record: Any) -> Any:
        return lambda self, change: None if isinstance(change, kind) else record(self, change)

    return make


def always_new(iteration: Any) -> Any:
    def spoiled(self: Splits, job: r.Job, asked: q.Open) -> r.Iteration:
        self._book.keys.clear()
        return iteration(self, job, asked)  # type: ignore[no-any-return]

    return spoiled


def ends_with_the_first(finish: Any) -> Any:
    def spoiled(self: Workers, number: int) -> None:
        iteration = self._book.state.iterations[number]
        if any(self._book.state.tasks[task].finished for task in iteration.tasks):
            self.end(iteration, r.FinishIteration(number))

    return spoiled


def no_tasks_for_newcomers(joined: Any) -> Any:
    def spoiled(self: Workers, event: q.WorkerJoined) -> None:
        iterations = self._book.state.iterations
        self._book.state.iterations = {}
        joined(self, event)
        self._book.state.iterations = iterations

    return spoiled


def without_marks(lose: Any) -> Any:
    def spoiled(portions: r.Portions, life: int, client: int, died: str) -> None:
        for portion in portions.open.values():
            portion.acked = 0
        lose(portions, life, client, died)

    return spoiled


def without_tasks(told: Any) -> Any:
    return lambda self, iteration: (told(self, iteration)[0], [], told(self, iteration)[2])


def without_the_end(restore: Any) -> Any:
    return lambda self, snapshot, records, now: restore(self, snapshot, list(records)[:-3], now)


BUGS: list[tuple[str, Plant, str]] = [
    ("positions are given twice", replaced(State, "_give", standing_still), "D1"),
    ("a repeated question gets new positions", replaced(Dealing, "splits", forgetful), "D1"),
    ("answers leave before they are durable", replaced(Commits, "flush", hasty), ""),
    ("positions that were given are not written down", replaced(Commits, "record", unrecorded(r.GiveSplits)), "D1"),
    ("the end of a task is not written down", replaced(Commits, "record", unrecorded(r.FinishTask)), ""),
    ("the state is kept although the journal failed", replaced(Commits, "failed", careless), "D"),
    ("each iterator has an iteration of its own", replaced(Splits, "_iteration", always_new), "D2"),
    ("an iteration ends when the first task does", replaced(Workers, "_finish_if_over", ends_with_the_first), ""),
    ("newcomers get no tasks", replaced(Workers, "joined", no_tasks_for_newcomers), "D"),
    ("clients are told of no tasks", replaced(Clients, "_told", without_tasks), "D4"),
    ("workers are not told when tasks change", replaced(Workers, "news", deaf), "D4"),
    ("a worker that does not come back is never given up", replaced(Workers, "tick", deaf), "D4"),
    ("members are not placed again after the journal failed", replaced(Workers, "reconcile", deaf), "D"),
    ("a restart brings the state back without its end", replaced(Book, "restore", without_the_end), ""),
    ("a lost answer is not computed again", replaced(Portioning, "missed", deaf), "D4"),
    ("acknowledgements are not written down", replaced(Commits, "record", unrecorded(r.Acknowledge)), ""),
    ("portions that were given out are not written down", replaced(Commits, "record", unrecorded(r.GivePortions)), ""),
    ("what was acknowledged is given out again", replaced(cutting, "lose", without_marks), "exactly once"),
]


@pytest.mark.parametrize(("what", "plant", "promise"), BUGS, ids=[bug[0] for bug in BUGS])
def test_a_planted_bug_is_found(what: str, plant: Plant, promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(SEEDS_MAX):
        try:
            simulate_data_service(seed)
        except AssertionError as error:
            assert str(error).startswith(promise), error  # noqa: PT017
            return
        except Exception:  # the state broke: that is seen, too
            return
    pytest.fail(f"{SEEDS_MAX} seeds did not see that {what}")
