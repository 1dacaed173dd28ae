"""Questions, and how their answers are compared: blocks that take turns, and the median of their ratios.

Theory of operation
    zmqdist and another system answer a question in turns, in blocks of a fraction of a second, so that other load on the host affects both
    systems alike. The first blocks of each system are not counted, because they include the time for connections and imports. They also
    determine how many pieces of work fill a block. The other systems are measured one after the other, so that at most one of them, with
    all its daemons, runs beside zmqdist.

    A ratio says how many times better zmqdist is; if it is below 1, the other system is better. It is the median of the ratios of the pairs
    of blocks, and not the ratio of the two medians that are printed beside it.

Not here: what a question is (one file each), how a process is started and asked (systems.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Final

from benchmarks.systems import OURS, Session, System, Unusable
from zmqdist.observe.bench import p99

Say = Callable[[str], object]

FASTER_MAX: Final = 50.0
"""The next look is at so many times as many pieces of work at most: a very short block says little."""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
      blocks: counted blocks of each side of a pair.
      starts: the same for questions to fresh processes, which take seconds each.
      block_s: seconds that a block should take.
      count_max: pieces of work in a block at most.
      sizes: bytes of the arrays of `bandwidth`.
      fanout_bytes: bytes of the array of `fanout`.
      queued: tasks that `memory` queues at zmqdist's dispatcher.
      queued_each: tasks that it queues at each system.
      ring_bytes: of the array of `collectives`.
      element_bytes: of the arrays of `data_arrays`.
      model_bytes: of the model of `ps_model`.
      greedy_bytes: that one client sends at once in `greedy`.
      workers, tasks: the axes of `scale`.
    """

    blocks: int = 9
    starts: int = 5
    block_s: float = 0.5
    count_max: int = 200_000
    sizes: tuple[int, ...] = (2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
    fanout_bytes: int = 2**26
    queued: int = 1_000_000
    queued_each: int = 10_000
    ring_bytes: int = 2**26
    element_bytes: int = 2**22
    model_bytes: int = 2**28
    greedy_bytes: int = 10 * 2**30
    workers: tuple[int, ...] = (2, 10, 100, 1000, 10_000)
    tasks: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000)


FULL: Final = Plan()
QUICK: Final = Plan(
    blocks=3,
    starts=2,
    block_s=0.3,
    sizes=(2**16, 2**20, 2**24, 2**28),
    queued=200_000,
    queued_each=2000,
    greedy_bytes=2**30,
)


@dataclass(frozen=True)
class Case:
    """One set of arguments of a question: `label` for the reader, `arguments` for the systems."""

    label: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One answer.

    Attributes:
      question, case: what was asked.
      system: who answered, by its title.
      unit: of `median` and `p99`; what ends in "/s" is better when larger, all else when smaller.
      p99: the 99th percentile of single pieces of work, where those were timed.
      ratio: how many times better zmqdist was in the same run; None for zmqdist itself and where nothing is compared.
      at: where the figure stands on the axis of a plot, such as bytes or workers.
    """

    question: str
    case: str
    system: str
    unit: str
    median: float
    p99: float | None = None
    ratio: float | None = None
    at: float | None = None


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      name: of its file, and of the method that answers it.
      title: the question, as a reader would put it.
      unit: of its figures, empty where nothing is compared; `scale` times what the systems answer, which is in base units.
      cases: the arguments of the systems.
      count: pieces of work of the first block; 0 for a question whose count is in its arguments.
      blocks: counted blocks at most; 0 for as many as the plan has.
      longer: its blocks take so many times as long as the plan says, and have so many times as many pieces.
      rests: what a block has left behind is waited for after each.
      each: whether single pieces of work are timed, so that there is a 99th percentile.
      fresh: it is put to a fresh process each time, and where that answers nothing, the figure is the time from its start on.
      own: figures that nothing is compared with.
      curve: the name of the axis that `Figure.at` counts, for a plot of lines; empty for bars.
    """

    name: str
    title: str
    unit: str
    scale: float = 1.0
    cases: Callable[[Plan], list[Case]] = lambda _: [Case()]
    count: int = 0
    blocks: int = 0
    longer: int = 1
    rests: bool = False
    each: bool = False
    fresh: bool = False
    own: Callable[[Plan], list[Figure]] | None = None
    curve: str = ""


@dataclass
class Answers:
    """The figures of one question, and who was left out, why."""

    question: Question
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Side:
    """One system: a process that is started at the first question and again after a failure."""

    def __init__(self, system: System, pythons: dict[str, str]) -> None:
        self.system = system
        self.version = ""
        self._pythons = pythons
        self._session: Session | None = None
        self._missing: Unusable | None = None
        self.counts: dict[tuple[str, str], int] = {}
        """Pieces of work that fill a block, by question and case, once that is known."""

    def can(self, question: Question) -> bool:
        """Whether it knows the question. Raises Unusable when it cannot be asked at all."""
        return question.name in self._open().answers

    def block(self, question: Question, case: Case, count: int) -> list[float]:
        """The answers of one block, in base units. Raises Unusable; the next block starts another process."""
        what = {"count": count, **case.arguments} if count else case.arguments
        if question.fresh:
            self.close()
            start = time.perf_counter()
            with Session(self.system, self._pythons) as session:
                return session.ask(question.name, **what) or [time.perf_counter() - start]
        try:
            return self._open().ask(question.name, **what)
        except Unusable:
            self.close()
            raise

    def rest(self, question: Question) -> None:
        """Wait for what was left behind, where the question wants it."""
        if question.rests and self._session is not None:
            self._session.ask("rest")

    def _open(self) -> Session:
        if self._missing is not None:
            raise self._missing
        if self._session is None:
            try:
                self._session = Session(self.system, self._pythons)
            except Unusable as reason:
                self._missing = reason
                raise
            self.version = self.version or self._session.version()
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure(
    questions: Iterable[Question], against: Iterable[System], plan: Plan, pythons: dict[str, str], say: Say
) -> tuple[dict[str, Answers], dict[str, str]]:
    """All questions to zmqdist and to each of the others.

    Returns:
      The answers by question, and the versions of those who gave some, by title.

    Raises:
      Unusable: zmqdist itself failed.
    """
    answers = {question.name: Answers(question) for question in questions}
    fresh = [found for found in answers.values() if found.question.fresh]
    talking = [found for found in answers.values() if not found.question.fresh and found.question.unit]
    ours: dict[tuple[str, str], list[list[float]]] = {}
    versions: dict[str, str] = {}
    others = list(against)
    for wanted in (fresh, talking):  # those of fresh processes before there are sessions that linger
        with Side(OURS, pythons) as mine:
            for system in others if wanted else ():
                with Side(system, pythons) as other:
                    _compare(wanted, mine, other, plan, ours, say)
                    versions |= {side.system.title: side.version for side in (mine, other) if side.version}
            for found in wanted:
                for at, case in enumerate(found.question.cases(plan)):
                    key = (found.question.name, case.label)
                    if key not in ours:
                        say(f"{found.question.name} {case.label}")
                        count = _calibrated(mine, found.question, case, plan)
                        ours[key] = [
                            mine.block(found.question, case, count) for _ in range(blocks_of(found.question, plan))
                        ]
                    found.figures.insert(at, _figure(found.question, case, OURS, ours[key], None))
    for found in answers.values():
        if found.question.own is not None:
            say(f"{found.question.name}: zmqdist's own figures")
            found.figures += found.question.own(plan)
    return answers, versions


def _compare(
    wanted: list[Answers],
    mine: Side,
    other: Side,
    plan: Plan,
    ours: dict[tuple[str, str], list[list[float]]],
    say: Say,
) -> None:
    """All questions to one system; who cannot answer one gets a line."""
    for found in wanted:
        question = found.question
        for case in question.cases(plan):
            where = other.system.title
            try:
                if not other.can(question):
                    break
                where = f"{where} at {case.label}" if case.label else where
                say(f"{question.name}: {where}")
                with _blaming(mine):
                    count = _calibrated(mine, question, case, plan)
                taken = pairs(mine, other, question, case, plan, count)
            except Unusable as reason:
                found.skipped.append(f"skipped: {where}: {reason}")
                say(found.skipped[-1])
                if where == other.system.title:
                    break
                continue
            ours.setdefault((question.name, case.label), []).extend(pair[0] for pair in taken)
            ratio = median(times_better(question, *map(median, pair)) for pair in taken)
            theirs = [pair[1] for pair in taken]
            found.figures.append(_figure(question, case, other.system, theirs, ratio))


def pairs(
    mine: Side, other: Side, question: Question, case: Case, plan: Plan, count: int
) -> list[tuple[list[float], list[float]]]:
    """So many blocks of each in turn, each first as often as the other."""
    others = _calibrated(other, question, case, plan)

    def mine_s() -> list[float]:
        with _blaming(mine):
            answer = mine.block(question, case, count)
            mine.rest(question)
        return answer

    def theirs_s() -> list[float]:
        answer = other.block(question, case, others)
        other.rest(question)
        return answer

    pairs = []
    for number in range(blocks_of(question, plan)):
        if number % 2:
            theirs = theirs_s()
            pairs.append((mine_s(), theirs))
        else:
            own = mine_s()
            pairs.append((own, theirs_s()))
    return pairs


@contextlib.contextmanager
def _blaming(mine: Side) -> Iterator[None]:
    """Turn a failure of zmqdist into an error that ends the run, because the failure must not be reported as a failure of another
    system."""
    try:
        yield
    except Unusable as reason:
        raise RuntimeError(f"zmqdist itself: {reason}") from None


def _calibrated(side: Side, question: Question, case: Case, plan: Plan) -> int:
    """How many pieces of work take about a block's time; the blocks that are done to find out are not counted."""
    key = (question.name, case.label)
    if key not in side.counts:
        if question.count:
            long = replace(plan, block_s=plan.block_s * question.longer, count_max=plan.count_max * question.longer)
            side.counts[key] = fitting(lambda count: side.block(question, case, count), question.count, long)
            side.rest(question)
        else:
            side.counts[key] = 0
            if blocks_of(question, plan) > 1:
                side.block(question, case, 0)  # warms the disk's cache
    return side.counts[key]


def fitting(block: Callable[[int], object], count: int, plan: Plan) -> int:
    """How many fill a block, beginning with `count`. The first one pays for processes, connections and imports, and tells nothing."""

    def times(factor: float) -> int:
        return max(1, min(plan.count_max, int(count * factor)))

    block(1)
    count = times(1)
    for _ in range(2):
        took = _seconds(block, count)
        if took > plan.block_s / 2:
            return times(plan.block_s / took)
        count = times(min(FASTER_MAX, plan.block_s / took))
    return count


def _seconds(block: Callable[[int], object], count: int) -> float:
    start = time.perf_counter()
    block(count)
    return time.perf_counter() - start


def blocks_of(question: Question, plan: Plan) -> int:
    """How many blocks of each side count."""
    wanted = plan.starts if question.fresh else plan.blocks
    return min(wanted, question.blocks or wanted)


def times_better(question: Question, mine: float, other: float) -> float:
    return mine / other if question.unit.endswith("/s") else other / mine


def _figure(question: Question, case: Case, system: System, blocks: list[list[float]], ratio: float | None) -> Figure:
    values = [value * question.scale for block in blocks for value in block]
    middle = median(median(block) for block in blocks) * question.scale
    at = next(iter(case.arguments.values()), None) if question.curve else None
    return Figure(
        question.name,
        case.label,
        system.title,
        question.unit,
        middle,
        p99(values) if question.each else None,
        ratio,
        at,
    )


def to_stderr(text: str) -> None:
    """For who waits: what is being measured now, and who was left out."""
    print(text, file=sys.stderr, flush=True)
