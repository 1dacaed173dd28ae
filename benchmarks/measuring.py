"""The questions of the benchmarks, and how the answers of systems are compared: by the median of
the ratios of blocks that take turns.

Theory of operation
    zmqdist and another system answer a question in turns, in blocks of a fraction of a second, so
    that other load on the host affects both systems alike. The first blocks of each system are not
    counted, because they include the time for connections and imports. They also determine how many
    pieces of work fill a block. The other systems are measured one after the other, so that at most
    one of them, with all its daemons, runs beside zmqdist.

    A ratio says how many times better zmqdist is; if it is below 1, the other system is better. A
    ratio is the median of the ratios of the pairs of blocks, and not the ratio of the two medians
    that are printed beside it.

Not here: the definitions of the questions (one file for each), and the processes of the systems
(systems.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.systems import OURS, Session, System, Unusable
from zmqdist.observe.bench import p99

Say = Callable[[str], object]

FASTER_MAX: Final = 50.0
"""The largest factor by which the number of pieces of work grows after a trial block. The time of a
very short block is not reliable."""


@dataclass(frozen=True)
class Plan:
    """The amounts that a run of the benchmarks measures.

    Attributes:
      blocks: number of counted blocks of each of the two systems that are compared.
      starts: number of counted blocks of a question with a fresh process for each block, which
        takes seconds.
      block_s: seconds that a block should take.
      count_max: the most pieces of work in a block.
      windows: numbers of calls in flight of `calls`.
      sizes: bytes of the arrays of `bandwidth`.
      fanout_bytes: bytes of the array of `fanout`.
      queued: number of tasks that `memory` queues at zmqdist's dispatcher.
      queued_each: number of tasks that `memory` queues at each system.
      ring_bytes: bytes of the array of `collectives`.
      element_bytes: bytes of each array of `data_arrays`.
      model_bytes: bytes of the model of `ps_model`.
      greedy_bytes: bytes that one client sends at once in `greedy`.
      workers, tasks: the numbers of workers and of tasks that `scale` measures.
    """

    blocks: int = 9
    starts: int = 5
    block_s: float = 0.5
    count_max: int = 200_000
    windows: tuple[int, ...] = (500, 1000, 2000, 20_000)
    sizes: tuple[int, ...] = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
    fanout_bytes: int = 2**26
    queued: int = 1_000_000
    queued_each: int = 10_000
    ring_bytes: int = 2**26
    element_bytes: int = 2**22
    model_bytes: int = 2**28
    greedy_bytes: int = 10 * 2**30
    workers: tuple[int, ...] = (2, 10, 100, 1000, 10_000, 100_000)
    tasks: tuple[int, ...] = (1000, 10_000, 100_000, 1_000_000)


FULL: Final = Plan()
QUICK: Final = Plan(
    blocks=3,
    starts=2,
    block_s=0.3,
    windows=(500, 2000),
    sizes=(2**12, 2**16, 2**20, 2**24, 2**28),
    queued=200_000,
    queued_each=2000,
    greedy_bytes=2**30,
)


@dataclass(frozen=True)
class Case:
    """One set of arguments of a question. `label` names it in tables and plots, and the systems get
    `arguments`."""

    label: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One answer.

    Attributes:
      question, case: the name of the question, and the label of its case.
      system: the title of the system that answered.
      unit: the unit of `median` and `p99`. If it ends in "/s", larger figures are better, otherwise
        smaller figures are.
      p99: the 99th percentile of single pieces of work; None if these were not timed.
      ratio: how many times better zmqdist was in the same run; None for zmqdist itself, and if
        there is no comparison.
      at: the position of the figure on the axis of a plot, such as a number of bytes or workers;
        None if there is no axis.
      quartiles: the lower and upper quartile of the ratios of the pairs, whose median is `ratio`.
    """

    question: str
    case: str
    system: str
    unit: str
    median: float
    p99: float | None = None
    ratio: float | None = None
    at: float | None = None
    quartiles: tuple[float, float] | None = None


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
      name: the name of the question's file, and of the method of each system that answers it.
      title: a short text of the question for tables and plots.
      unit: the unit of the figures; empty if no systems are compared. `scale` converts the answers
        of the systems, in base units, to it.
      cases: returns the cases of the question, each with its arguments for the systems.
      count: number of pieces of work in the first block. 0 means that the arguments of the cases
        have the count, if there is one.
      blocks: the most counted blocks; 0 means as many as the plan has.
      longer: factor by which the blocks of this question may be longer, and have more pieces of
        work, than the plan says.
      rests: whether to wait after each block until the processes of the system have come to rest.
      each: whether single pieces of work are timed, so that there is a 99th percentile.
      fresh: whether each block has a fresh process. If its answer is empty, the figure is the time
        from the start of the process.
      own: returns further figures, which are not compared with those of other systems.
      curve: the name of the axis of `Figure.at`, for a plot of lines; empty for a plot of bars.
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
    """The figures of one question, and a line for each system that was left out, with the
    reason.
    """

    question: Question
    figures: list[Figure] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class Side:
    """One of the two systems that are compared. Its process is started at the first question, and
    again after a failure."""

    def __init__(self, system: System, pythons: dict[str, str]) -> None:
        self.system = system
        self.version = ""
        self._pythons = pythons
        self._session: Session | None = None
        self._missing: Unusable | None = None
        self.counts: dict[tuple[str, str], int] = {}
        """(question, case) -> the number of pieces of work that fill a block, once it is known."""

    def can(self, question: Question) -> bool:
        """Return whether the system can answer the question. Raises Unusable if the system cannot
        be started."""
        return question.name in self._open().answers

    def block(self, question: Question, case: Case, count: int) -> list[float]:
        """Return the answers of one block, in base units. Raises Unusable if the system fails; the
        next block then starts a new process."""
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
        """Wait until the system has come to rest, if the question requires it (`rests`)."""
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
    questions: Iterable[Question],
    against: Iterable[System],
    plan: Plan,
    pythons: dict[str, str],
    say: Say,
) -> tuple[dict[str, Answers], dict[str, str]]:
    """Measure all questions for zmqdist and for each of the other systems. `say` is called with a
    line about each step.

    Returns:
      The answers by question, and the versions of the systems that were started, by title.

    Raises:
      Unusable: zmqdist itself failed.
    """
    answers = {question.name: Answers(question) for question in questions}
    fresh = [found for found in answers.values() if found.question.fresh]
    talking = [
        found for found in answers.values() if not found.question.fresh and found.question.unit
    ]
    ours: dict[tuple[str, str], list[list[float]]] = {}
    versions: dict[str, str] = {}
    others = list(against)
    for wanted in (fresh, talking):
        # first the fresh processes, while no other process of a system runs
        with Side(OURS, pythons) as mine:
            for system in others if wanted else ():
                with Side(system, pythons) as other:
                    _compare(wanted, mine, other, plan, ours, say)
                    versions |= {
                        side.system.title: side.version for side in (mine, other) if side.version
                    }
            for found in wanted:
                for at, case in enumerate(found.question.cases(plan)):
                    key = (found.question.name, case.label)
                    if key not in ours:
                        say(f"{found.question.name} {case.label}")
                        count = _calibrated(mine, found.question, case, plan)
                        ours[key] = [
                            mine.block(found.question, case, count)
                            for _ in range(blocks_of(found.question, plan))
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
    """Measure all questions for zmqdist and one other system in turns. If the other system cannot
    answer a question, record the reason."""
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
            ratios = [times_better(question, *map(median, pair)) for pair in taken]
            theirs = [pair[1] for pair in taken]
            found.figures.append(_figure(question, case, other.system, theirs, ratios))


def pairs(
    mine: Side, other: Side, question: Question, case: Case, plan: Plan, count: int
) -> list[tuple[list[float], list[float]]]:
    """Run the blocks of two systems in turns, and return the pairs of answers. Each system is the
    first one in every second pair."""
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
    """Turn a failure of zmqdist into an error that ends the run, because the failure must not be
    reported as a failure of another system."""
    try:
        yield
    except Unusable as reason:
        raise RuntimeError(f"zmqdist itself: {reason}") from None


def _calibrated(side: Side, question: Question, case: Case, plan: Plan) -> int:
    """Return the number of pieces of work that fill a block. The first call for a case runs trial
    blocks, which are not counted."""
    key = (question.name, case.label)
    if key not in side.counts:
        if question.count:
            long = replace(
                plan,
                block_s=plan.block_s * question.longer,
                count_max=plan.count_max * question.longer,
            )
            side.counts[key] = fitting(
                lambda count: side.block(question, case, count), question.count, long
            )
            side.rest(question)
        else:
            side.counts[key] = 0
            if blocks_of(question, plan) > 1:
                side.block(question, case, 0)  # warms the disk's cache
    return side.counts[key]


def fitting(block: Callable[[int], object], count: int, plan: Plan) -> int:
    """Return how many pieces of work fill a block. The first trial block has `count` pieces. A
    block of one piece runs before it and is not timed, because it includes the start of processes,
    connections and imports."""

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
    """Return the number of counted blocks of each system."""
    wanted = plan.starts if question.fresh else plan.blocks
    return min(wanted, question.blocks or wanted)


def times_better(question: Question, mine: float, other: float) -> float:
    return mine / other if question.unit.endswith("/s") else other / mine


def _figure(
    question: Question,
    case: Case,
    system: System,
    blocks: list[list[float]],
    ratios: list[float] | None,
) -> Figure:
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
        None if ratios is None else median(ratios),
        at,
        None if ratios is None else _quartiles(ratios),
    )


def _quartiles(ratios: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return low, high


def to_stderr(text: str) -> None:
    """Print a line about the progress to standard error."""
    print(text, file=sys.stderr, flush=True)
