"""Pipelines drawn at random, each run plainly, by the service, and from a saved state: do they give
the same elements?

    with Services() as services:
        check_equivalence(1234, services)

A seed decides on the pipeline, the mode, the number of workers and the place at which the state is
saved.
"""

from __future__ import annotations

import contextlib
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, TypeAlias

import numpy as np

from tests.data.service.helpers import TestCluster
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.data import Dataset
from zmqdist.data.service.policy import ShardingPolicy
from zmqdist.errors import UnimplementedError

WORKERS_MAX: Final = 3
OPERATORS_MAX: Final = 5

MODES: Final = ("local", "off", "dynamic", "data", "exactly_once", "ordered", "per_worker")

REFUSALS: Final = ("put it behind distribute()", "Splitting is not implemented")
"""What docs/delivery.md and docs/data_service.md say of pipelines that a mode cannot run."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline of numbers, or of batches of numbers.

    Attributes:
      make: returns the pipeline, made anew.
      text: the pipeline as a reader of a failure needs it.
      fixed: whether each run gives the same order.
      settled: whether each run gives the same elements.
      dealt: whether several workers that divide the positions of the sources give the same elements
        as one.
    """

    make: Callable[[], Dataset]
    text: str
    fixed: bool = True
    settled: bool = True
    dealt: bool = True


Chance: TypeAlias = random.Random


class Squares:
    """A source with positions."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, position: int) -> int:
        return position**2


def draw(chance: Chance, mode: str) -> Pipeline:
    """A pipeline of up to OPERATORS_MAX operators, most often one that the mode can run."""
    portions = mode in ("exactly_once", "ordered")
    families: list[Callable[[Chance, Pipeline], Pipeline]] = (
        [_one_by_one] * 30 if portions else [_one_by_one] * 2
    )
    families += [_all, _at_random, _by_place, _of_several]
    pipeline = _source(chance)
    for _ in range(chance.randint(0, OPERATORS_MAX)):
        pipeline = chance.choice(families)(chance, pipeline)
    if chance.random() < 0.4:
        pipeline = _then(pipeline, "repeat(2)", lambda dataset: dataset.repeat(2))
    if chance.random() < 0.2 and not portions:
        size = chance.randint(1, 5)
        pipeline = _then(pipeline, f"batch({size})", lambda dataset: dataset.batch(size))
    return pipeline


def _source(chance: Chance) -> Pipeline:
    count, seed = chance.choice((0, 1, 7, 20, 40)), chance.randint(0, 9)
    sources: list[tuple[str, Callable[[], Dataset], dict[str, bool]]] = [
        (f"range({count})", lambda: Dataset.range(count), {}),
        (f"range({count}, 0, -2)", lambda: Dataset.range(count, 0, -2), {}),
        (f"slices({count})", lambda: Dataset.from_tensor_slices(np.arange(count) * 3), {}),
        ("from_source", lambda: Dataset.from_source(Squares()), {}),
        (
            f"generator({count})",
            lambda: Dataset.from_generator(lambda: iter(range(count)), output_signature=_INT),
            {},
        ),
        (
            f"random(seed={seed}).take(9)",
            lambda: Dataset.random(seed=seed).take(9),
            {"dealt": False},
        ),
    ]
    text, make, facts = chance.choice(sources if chance.random() < 0.2 else sources[:4])
    return Pipeline(make, text, **facts)


_INT: Final = Dataset.range(1).element_spec


def _then(
    pipeline: Pipeline, text: str, apply: Callable[[Dataset], Dataset], **facts: bool
) -> Pipeline:
    return replace(
        pipeline, make=lambda: apply(pipeline.make()), text=f"{pipeline.text}.{text}", **facts
    )


def _one_by_one(chance: Chance, pipeline: Pipeline) -> Pipeline:
    """Operators whose elements come from one element each."""
    size, seed = chance.randint(1, 4), chance.randint(0, 9)
    steps: list[tuple[str, Callable[[Dataset], Dataset]]] = [
        ("map", lambda dataset: dataset.map(lambda x: 3 * x + 1)),
        ("map in threads", lambda dataset: dataset.map(lambda x: x - 1, num_parallel_calls=2)),
        ("filter", lambda dataset: dataset.filter(lambda x: bool(x % 3))),
        ("flat_map", lambda dataset: dataset.flat_map(lambda x: Dataset.range(x % 3))),
        (
            "flat_map with a shuffle",
            lambda dataset: dataset.flat_map(
                lambda x: Dataset.range(x, x + 3).shuffle(3, seed=seed)
            ),
        ),
        (
            "interleave",
            lambda dataset: dataset.interleave(
                lambda x: Dataset.range(x % 3), cycle_length=1, block_length=size
            ),
        ),
        ("prefetch", lambda dataset: dataset.prefetch(size)),
        ("repeat(2)", lambda dataset: dataset.repeat(2)),
    ]
    return _then(pipeline, *chance.choice(steps))


def _all(chance: Chance, pipeline: Pipeline) -> Pipeline:
    """Operators that look at several elements, and keep all of them."""
    size = chance.randint(1, 4)
    steps: list[tuple[str, Callable[[Dataset], Dataset]]] = [
        (
            f"interleave({size})",
            lambda dataset: dataset.interleave(
                lambda x: Dataset.range(x, x + 2), cycle_length=size
            ),
        ),
        (
            f"interleave({size}) in threads",
            lambda dataset: dataset.interleave(
                lambda x: Dataset.range(x, x + 2), cycle_length=size, num_parallel_calls=2
            ),
        ),
        (f"batch({size}).unbatch", lambda dataset: dataset.batch(size).unbatch()),
        (
            f"batch({size}).rebatch(3).unbatch",
            lambda dataset: dataset.batch(size).rebatch(3).unbatch(),
        ),
        (f"padded_batch({size}).unbatch", lambda dataset: dataset.padded_batch(size).unbatch()),
        ("cache", lambda dataset: dataset.cache()),
        (
            f"group_by_window({size})",
            lambda dataset: dataset.group_by_window(
                lambda x: x % 2, lambda key, window: window, window_size=size
            ),
        ),
    ]
    return _then(pipeline, *chance.choice(steps))


def _at_random(chance: Chance, pipeline: Pipeline) -> Pipeline:
    size, seed = chance.randint(1, 30), chance.choice((None, None, 3, 8))
    again = chance.random() < 0.7

    def shuffled(dataset: Dataset) -> Dataset:
        return dataset.shuffle(size, seed, again)

    def cut(x: Any) -> Dataset:
        return shuffled(Dataset.range(x, x + 4))

    steps: list[tuple[str, Callable[[Dataset], Dataset]]] = [
        ("", shuffled),
        ("", shuffled),
        ("flat_map of ", lambda dataset: dataset.flat_map(cut)),
        (
            "interleave of ",
            lambda dataset: dataset.interleave(cut, cycle_length=3, num_parallel_calls=2),
        ),
        (
            "group_by_window of ",
            lambda dataset: dataset.group_by_window(
                lambda x: x % 2, lambda _, window: shuffled(window), window_size=3
            ),
        ),
    ]
    where, step = chance.choice(steps)
    text = f"{where}shuffle({size}, {seed}, {again})"
    return _then(pipeline, text, step, fixed=pipeline.fixed and seed is not None)


def _by_place(chance: Chance, pipeline: Pipeline) -> Pipeline:
    """Operators that count: their elements depend on which elements came before."""
    size = chance.randint(1, 12)
    steps: list[tuple[str, Callable[[Dataset], Dataset]]] = [
        (f"take({size})", lambda dataset: dataset.take(size)),
        (f"skip({size})", lambda dataset: dataset.skip(size)),
        (
            f"window({size}, 2)",
            lambda dataset: dataset.window(size, 2, drop_remainder=True).flat_map(lambda w: w),
        ),
        (
            f"batch({size}, drop)",
            lambda dataset: dataset.batch(size, drop_remainder=True).unbatch(),
        ),
        (
            "scan",
            lambda dataset: dataset.scan(np.int64(0), lambda total, x: (total + x, total + x)),
        ),
        ("take_while", lambda dataset: dataset.take_while(lambda x: x < 60)),
        ("unique", lambda dataset: dataset.unique()),
        ("shard(3, 1)", lambda dataset: dataset.shard(3, 1)),
        (
            "rejection_resample",
            lambda dataset: dataset.rejection_resample(lambda x: x % 2, [0.3, 0.7], seed=size).map(
                lambda _, x: x
            ),
        ),
    ]
    settled = pipeline.fixed and pipeline.settled
    if chance.random() < 0.2:
        return _then(
            pipeline,
            "enumerate",
            lambda dataset: dataset.enumerate().map(_mixed),
            settled=settled,
            dealt=True,
        )
    return _then(pipeline, *chance.choice(steps), settled=settled, dealt=False)


def _mixed(x: Any, y: Any) -> Any:
    return 1009 * x + y


def _of_several(chance: Chance, pipeline: Pipeline) -> Pipeline:
    """Operators with several inputs."""
    other, seed = _source(chance), chance.randint(0, 9)
    if chance.random() < 0.5:
        other = _at_random(chance, _one_by_one(chance, other))
    joins: list[tuple[str, Callable[[Dataset, Dataset], Dataset]]] = [
        ("concatenate", lambda one, two: one.concatenate(two)),
        ("zip", lambda one, two: Dataset.zip(one, two).map(_mixed)),
        (
            "zip with itself",
            lambda one, two: Dataset.zip(one, Dataset.zip(two, one).map(_mixed)).map(_mixed),
        ),
        (
            "choose",
            lambda one, two: Dataset.choose_from_datasets(
                [one, two], Dataset.range(60).map(lambda x: x % 2), False
            ),
        ),
        ("sample", lambda one, two: Dataset.sample_from_datasets([one, two], seed=seed)),
    ]
    text, join = chance.choice(joins)
    fixed = pipeline.fixed and other.fixed
    settled = pipeline.settled and other.settled and (fixed or text == "concatenate")
    return Pipeline(
        lambda: join(pipeline.make(), other.make()),
        f"{text}({pipeline.text}, {other.text})",
        fixed,
        settled,
        text not in ("concatenate", "sample") or (pipeline.dealt and other.dealt),
    )


class Services(contextlib.ExitStack):
    """The clusters that all cases share: for each number of workers, one with and one without fixed
    shares."""

    def __init__(self) -> None:
        super().__init__()
        self._clusters: dict[tuple[int, bool], TestCluster] = {}
        for workers in range(1, WORKERS_MAX + 1):
            for addresses in (None, ["localhost"] * workers):
                cluster = TestCluster(
                    workers, fault_tolerant_mode=False, worker_addresses=addresses
                )
                self._clusters[workers, addresses is not None] = self.enter_context(cluster)

    def cluster(self, workers: int, fixed: bool = False) -> TestCluster:
        return self._clusters[workers, fixed]


def numbers(elements: Iterator[Any]) -> list[Any]:
    return [x.tolist() for x in elements]


def flat(elements: list[Any]) -> list[int]:
    return [int(x) for element in elements for x in np.ravel(element)]


@dataclass(frozen=True)
class Case:
    """One drawn case. `name` says what it is."""

    name: str
    pipeline: Pipeline
    mode: str
    workers: int
    chance: Chance


def drawn(seed: int) -> Case:
    chance = random.Random(seed)
    mode, workers = chance.choice(MODES), chance.randint(1, WORKERS_MAX)
    pipeline = draw(chance, mode)
    return Case(f"{mode} by {workers}: {pipeline.text}", pipeline, mode, workers, chance)


def check_equivalence(seed: int, services: Services) -> bool:
    """Compare a case with its plain run. Return False if the service refused the pipeline by a
    documented sentence."""
    case = drawn(seed)
    check = {
        "local": _check_local,
        "exactly_once": _check_portions,
        "ordered": _check_portions,
        "per_worker": _check_per_worker,
    }.get(case.mode, _check_mode)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the dataset depends on external state")
        try:
            check(case, services)
        except AssertionError:
            raise
        except Exception as error:
            if isinstance(error, UnimplementedError) and any(
                text in error.message for text in REFUSALS
            ):
                return False
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
    return True


def _same(case: Case, found: list[Any], wanted: list[Any], ordered: bool) -> None:
    if ordered:
        assert found == wanted, f"{case.name}: {found} instead of {wanted}"
        return
    more, fewer = Counter(flat(found)), Counter(flat(wanted))
    assert more == fewer, (
        f"{case.name}: too many {dict(more - fewer)}, too few {dict(fewer - more)}"
    )


def _check_local(case: Case, _: Services) -> None:
    """A state that is saved at any place: the rest is that of the iterator that was saved."""
    first = iter(case.pipeline.make())
    begun = numbers(islice(first, case.chance.randint(0, 60)))
    state = json.dumps(first.state_dict())
    rest = numbers(first)
    for _ in range(2):
        second = iter(case.pipeline.make())
        second.load_state_dict(json.loads(state))
        _same(case, numbers(second), rest, ordered=True)
    if case.pipeline.fixed:
        _same(case, begun + rest, numbers(iter(case.pipeline.make())), ordered=True)


def _check_mode(case: Case, services: Services) -> None:
    """Reading at most once, without a fault, by one or two readers: the plain run's elements, once
    or once for each worker."""
    policy = {
        "off": ShardingPolicy.OFF,
        "dynamic": ShardingPolicy.DYNAMIC,
        "data": ShardingPolicy.DATA,
    }[case.mode]
    cluster = services.cluster(case.workers, fixed=case.mode == "data")
    passes, readers = case.chance.randint(1, 2), case.chance.choice((1, 1, 2))
    name = f"job {case.chance.random()}" if readers > 1 else None
    wanted = (
        numbers(iter(case.pipeline.make())) * passes * (case.workers if case.mode == "off" else 1)
    )
    distributed = [
        cluster.distribute(case.pipeline.make(), policy, job_name=name) for _ in range(readers)
    ]
    found = []
    for _ in range(passes):
        for iterator in [iter(dataset) for dataset in distributed]:
            found += numbers(iterator)
    if case.pipeline.settled and (
        case.pipeline.dealt or case.mode != "dynamic" or case.workers == 1
    ):
        _same(case, found, wanted, ordered=case.workers == readers == 1 and case.pipeline.fixed)


def _check_portions(case: Case, services: Services) -> None:
    """Exactly once and in order, in several passes, from a state at any place: the elements of the
    plain run."""
    chance, ordered = case.chance, case.mode == "ordered"
    passes, consumers, elsewhere = (
        chance.randint(1, 3),
        chance.choice((0, 0, 2)),
        chance.random() < 0.2,
    )
    name = f"job {chance.random()}" if consumers or chance.random() < 0.7 else None
    text, behind = chance.choice(_BEHIND)
    case = replace(
        case,
        name=f"{case.name}, {passes} passes, {consumers} consumers{' elsewhere' * elsewhere}, "
        f"then {text}",
    )

    def distributed(workers: int, consumer: int) -> Dataset:
        part = {"consumer_index": consumer, "num_consumers": consumers} if consumers else {}
        delivery = {"ordered": True} if ordered else {"delivery": "exactly_once"}
        cluster, options = services.cluster(workers), {"job_name": name, **part, **delivery}
        return behind(
            cluster.distribute(case.pipeline.make(), ShardingPolicy.DYNAMIC, **options).repeat(
                passes
            )
        )

    wanted = numbers(iter(behind(case.pipeline.make().repeat(passes))))
    found = []
    for consumer in range(max(1, consumers)):
        with iter(distributed(case.workers, consumer)) as first:
            found += numbers(islice(first, chance.randint(0, len(wanted))))
            state = json.dumps(first.state_dict())
            for _ in islice(first, chance.choice((0, chance.randint(0, len(wanted))))):
                # these elements were delivered after the state was saved, so the second iterator
                # delivers them again
                pass
        with iter(
            distributed(WORKERS_MAX + 1 - case.workers if elsewhere else case.workers, consumer)
        ) as second:
            second.load_state_dict(json.loads(state))
            found += numbers(second)
    if case.pipeline.settled:
        _same(case, found, wanted, ordered and not consumers and case.pipeline.fixed)


_BEHIND: Final[tuple[tuple[str, Callable[[Dataset], Dataset]], ...]] = (
    ("nothing", lambda dataset: dataset),
    ("batch(3)", lambda dataset: dataset.batch(3)),
    ("shuffle(5, seed=1)", lambda dataset: dataset.shuffle(5, seed=1)),
    ("prefetch(4)", lambda dataset: dataset.prefetch(4)),
    ("map in threads", lambda dataset: dataset.map(lambda x: x, num_parallel_calls=2)),
)


def _check_per_worker(case: Case, services: Services) -> None:
    """A dataset of which each worker of a coordinator reads its share."""
    cluster = services.cluster(case.workers)
    with ClusterCoordinator(cluster.target) as coordinator:
        iterator = iter(coordinator.create_per_worker_dataset(case.pipeline.make(), shard=True))
        shares = [
            coordinator.schedule(lambda it: [x.tolist() for x in it], (iterator,), worker=worker)
            for worker in range(case.workers)
        ]
        found = [x for share in coordinator.fetch(shares) for x in share]
    if case.pipeline.settled:
        _same(case, found, numbers(iter(case.pipeline.make())), ordered=False)
