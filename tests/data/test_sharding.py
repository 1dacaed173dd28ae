"""The share of one worker: where the shard is put by each policy, and that the shares of all make
the whole once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zmqdist.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    FixedLengthRecordDataset,
    Options,
    TextLineDataset,
)
from zmqdist.data.constants import SHARD_HINT
from zmqdist.data.dataset import deserialize
from zmqdist.data.interfaces import make
from zmqdist.data.ops.elementwise import ShardOp
from zmqdist.data.sharding import distributed_cardinality, shard_for_worker
from zmqdist.data.tree import Tree
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError

WORKERS = 5
TOO_FEW = "not enough for the required 5 shards/workers."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files of ten records: record 7 of file 3 is "3-7"."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(10):
        (folder / f"file-{file}").write_text("".join(f"{file}-{record}\n" for record in range(10)))
    return folder


@pytest.fixture(scope="module")
def names(folder: Path) -> list[str]:
    return sorted(map(str, folder.iterdir()))


def records(files: Any, numbers: Any = range(10)) -> list[str]:
    return [f"{file}-{record}" for file in files for record in numbers]


def share(dataset: Dataset, policy: str, index: int = 1, workers: int = WORKERS) -> Tree:
    """What a worker makes of a description that came to it."""
    return shard_for_worker(deserialize(dataset.serialize()), policy, workers, index)


def read(dataset: Tree) -> list[Any]:
    return [np.asarray(x).tolist() for x in dataset]


def union(dataset: Dataset, policy: str) -> list[Any]:
    return sorted(x for index in range(WORKERS) for x in read(share(dataset, policy, index)))


# -- ranges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "policy", "wanted"),
    [
        (Dataset.range(20), "DATA", [1, 6, 11, 16]),
        (Dataset.range(20), "FILE_OR_DATA", [1, 6, 11, 16]),
        (Dataset.range(20).shard(SHARD_HINT, SHARD_HINT), "HINT", [1, 6, 11, 16]),
        (Dataset.range(20).shard(SHARD_HINT, 0), "HINT", [1, 6, 11, 16]),
        (Dataset.range(20).shard(SHARD_HINT, 0).map(lambda x: -x), "HINT", [-1, -6, -11, -16]),
        (Dataset.range(20).shard(1, 0), "HINT", list(range(20))),
        (Dataset.range(20), "OFF", list(range(20))),
        (Dataset.range(20), "DYNAMIC", list(range(20))),
        (Dataset.range(20).batch(3), "DATA", [[3, 4, 5], [18, 19]]),
        (Dataset.range(20).batch(3), "FILE_OR_DATA", [[3, 4, 5], [18, 19]]),
        (
            Dataset.zip(Dataset.range(20), Dataset.range(20)),
            "FILE_OR_DATA",
            [[1, 1], [6, 6], [11, 11], [16, 16]],
        ),
        (Dataset.range(20).concatenate(Dataset.range(20)), "DATA", [1, 6, 11, 16] * 2),
        (Dataset.range(0), "DATA", []),
        (Dataset.range(0), "FILE_OR_DATA", []),
        (Dataset.range(0).shard(SHARD_HINT, 0), "HINT", []),
        (Dataset.range(3), "DATA", [1]),
    ],
)
def test_elements_are_divided_at_end_or_hint(
    dataset: Dataset, policy: str, wanted: list[Any]
) -> None:
    assert read(share(dataset, policy)) == wanted


@pytest.mark.parametrize("policy", ["FILE", "DATA", "FILE_OR_DATA", "HINT", "OFF", "DYNAMIC"])
def test_single_worker_gets_all_elements(policy: str, names: list[str]) -> None:
    assert read(share(TextLineDataset(names), policy, 0, 1)) == records(range(10))


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(20),
        Dataset.from_tensors(1).map(lambda x: x),
        Dataset.from_tensor_slices([1, 2]),
        Dataset.from_generator(lambda: iter([1])),
        Dataset.random(seed=1).take(3),
        Dataset.range(4).flat_map(lambda x: Dataset.range(x)),
        Dataset.range(0).flat_map(lambda x: Dataset.range(x)),
    ],
    ids=lambda dataset: str(dataset.op.name),
)
def test_source_without_files_is_unshardable(dataset: Dataset) -> None:
    with pytest.raises(NotFoundError, match="Found an unshardable source dataset"):
        share(dataset, "FILE")


def test_branch_without_files_is_unshardable(names: list[str]) -> None:
    mixed = Dataset.zip(TextLineDataset(names), Dataset.counter())
    with pytest.raises(NotFoundError, match=r"unshardable source dataset: counter"):
        share(mixed, "FILE")
    assert [x for x, _ in read(share(mixed, "FILE_OR_DATA"))] == records(range(10), [1, 6])


def test_shard_count_needs_index() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Index must be between 0 and 4 \(currently index = -1\)\."
    ):
        Dataset.range(20).shard(5, SHARD_HINT)


@pytest.mark.parametrize("policy", ["OFF", "FILE_OR_DATA", "DATA"])
def test_hint_under_other_policy_raises_at_read(policy: str) -> None:
    hinted = share(Dataset.range(20).shard(SHARD_HINT, SHARD_HINT), policy)
    with pytest.raises(
        FailedPreconditionError, match=r"`zmqdist.data.service.ShardingPolicy.HINT` processing mode"
    ):
        iter(hinted)


def test_wrong_policy_or_worker_is_refused() -> None:
    with pytest.raises(ValueError, match="'FILES' is no sharding policy"):
        share(Dataset.range(3), "FILES")
    with pytest.raises(InvalidArgumentError, match="Index must be between 0 and 4"):
        share(Dataset.range(3), "DATA", 5)


# -- files -----------------------------------------------------------------------------------------

FILE_PIPELINES: dict[str, Callable[[list[str]], Dataset]] = {
    "names": TextLineDataset,
    "mapped and batched": lambda names: TextLineDataset(names).map(lambda x: x).prefetch(2),
    "flat_map": lambda names: Dataset.from_tensor_slices(names).flat_map(TextLineDataset),
    "a chain in the function": lambda names: Dataset.from_tensor_slices(names).flat_map(
        lambda name: TextLineDataset(name).map(lambda x: x).prefetch(1)
    ),
    "numbers": lambda names: Dataset.range(10).flat_map(
        lambda number: TextLineDataset(names[number])
    ),
    "datasets": lambda names: (
        Dataset.from_tensor_slices(names).map(TextLineDataset).flat_map(lambda lines: lines)
    ),
    "a name that fails": lambda names: (
        Dataset.from_tensor_slices(["", *names])
        .map(lambda name: [name][0 if name else 1])
        .ignore_errors()
        .flat_map(TextLineDataset)
    ),
    "nested": lambda names: Dataset.from_tensor_slices(names).flat_map(
        lambda name: Dataset.from_tensors(name).flat_map(TextLineDataset)
    ),
    "mapped names": lambda names: TextLineDataset(
        Dataset.range(10).map(lambda number: names[number])
    ),
}


@pytest.mark.parametrize("policy", ["FILE", "FILE_OR_DATA"])
@pytest.mark.parametrize("build", FILE_PIPELINES.values(), ids=FILE_PIPELINES)
def test_files_are_divided_in_order(
    build: Callable[[list[str]], Dataset], policy: str, names: list[str]
) -> None:
    assert read(share(build(names), policy, 3)) == records([3, 8])


@pytest.mark.parametrize("policy", ["FILE", "FILE_OR_DATA"])
def test_interleaved_files_are_divided(policy: str, names: list[str]) -> None:
    dataset = Dataset.from_tensor_slices(names).interleave(TextLineDataset, cycle_length=10)
    assert read(share(dataset, policy, 3)) == [
        f"{file}-{record}" for record in range(10) for file in (3, 8)
    ]


SHUFFLED: dict[str, Callable[[str], Dataset]] = {
    "list_files": lambda pattern: TextLineDataset(Dataset.list_files(pattern)),
    "with a seed": lambda pattern: TextLineDataset(Dataset.list_files(pattern, seed=7)),
    "interleave": lambda pattern: Dataset.list_files(pattern).interleave(
        TextLineDataset, cycle_length=4
    ),
    "mapped": lambda pattern: TextLineDataset(Dataset.list_files(pattern).map(lambda name: name)),
    "in threads": lambda pattern: TextLineDataset(
        Dataset.list_files(pattern).map(
            lambda name: name, num_parallel_calls=4, deterministic=False
        )
    ),
    "several times": lambda pattern: TextLineDataset(
        Dataset.list_files(pattern).shuffle(3).prefetch(1).map(lambda name: name).shuffle(10)
    ),
}


@pytest.mark.parametrize("policy", ["FILE", "FILE_OR_DATA"])
@pytest.mark.parametrize("build", SHUFFLED.values(), ids=SHUFFLED)
def test_shuffled_names_are_divided_before_shuffle(
    build: Callable[[str], Dataset], policy: str, folder: Path
) -> None:
    dataset = build(str(folder / "*"))
    assert sorted(read(share(dataset, policy, 3))) == records([3, 8])
    assert union(dataset, policy) == sorted(records(range(10)))


def operators(dataset: Tree) -> list[str]:
    """From the end to the source."""
    return [each.op.name for each in reversed(dataset.walk())]


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (
            lambda files: TextLineDataset(files),
            ["text_lines", "shuffle", "shard", "from_tensor_slices"],
        ),
        (
            lambda files: TextLineDataset(files.repeat()),
            ["text_lines", "repeat", "shuffle", "shard", "from_tensor_slices"],
        ),
        (
            lambda files: TextLineDataset(files.take(7)),
            ["text_lines", "shuffle", "shard", "take", "from_tensor_slices"],
        ),
        (
            lambda files: files.interleave(TextLineDataset, 2).shuffle(9).batch(2),
            ["batch", "shuffle", "interleave", "shuffle", "shard", "from_tensor_slices"],
        ),
    ],
)
def test_shard_stands_before_reader_and_shuffles(
    build: Callable[[Dataset], Dataset], wanted: list[str], folder: Path
) -> None:
    assert operators(share(build(Dataset.list_files(str(folder / "*"))), "FILE")) == wanted


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (Dataset.range(9).prefetch(2), ["prefetch", "shard", "range"]),
        (
            Dataset.range(9).with_options(Options()).prefetch(1),
            ["prefetch", "options", "shard", "range"],
        ),
        (Dataset.range(9).prefetch(2).batch(2), ["shard", "batch", "prefetch", "range"]),
    ],
)
def test_prefetch_and_options_stay_behind_shard(dataset: Dataset, wanted: list[str]) -> None:
    assert operators(share(dataset, "DATA")) == wanted


def test_zip_and_concatenate_branches_are_divided(names: list[str]) -> None:
    files = TextLineDataset(names)
    pairs = Dataset.zip(files, TextLineDataset(names))
    assert read(share(pairs, "FILE", 3)) == [[x, x] for x in records([3, 8])]
    assert read(share(Dataset.zip(files, files), "FILE", 3)) == [[x, x] for x in records([3, 8])]
    assert read(share(files.concatenate(TextLineDataset(names)), "FILE", 3)) == records([3, 8]) * 2


def test_choice_inputs_are_divided_not_selector(names: list[str]) -> None:
    chosen = Dataset.choose_from_datasets(
        [TextLineDataset(names), TextLineDataset(names[::-1])], Dataset.range(2).repeat()
    )
    wanted = zip(records([3, 8]), records([6, 1]), strict=True)
    assert read(share(chosen, "FILE", 3)) == list(itertools.chain(*wanted))


def test_names_from_file_are_divided(names: list[str], tmp_path: Path) -> None:
    (tmp_path / "list").write_text("\n".join(names))
    dataset = TextLineDataset(str(tmp_path / "list")).interleave(TextLineDataset, cycle_length=1)
    assert read(share(dataset, "FILE", 3)) == records([3, 8])


def test_fixed_records_and_saved_elements_are_files(names: list[str], tmp_path: Path) -> None:
    assert read(share(FixedLengthRecordDataset(names, 4), "FILE", 3))[0] == b"3-0\n"
    Dataset.range(50).save(str(tmp_path / "saved"), shard_func=lambda x: x % 10)
    wanted = [*range(3, 50, 10), *range(8, 50, 10)]
    assert read(share(Dataset.load(str(tmp_path / "saved")), "FILE", 3)) == wanted
    by_hand = Dataset.load(
        str(tmp_path / "saved"), reader_func=lambda files: files.flat_map(lambda file: file)
    )
    assert read(share(by_hand, "FILE", 3)) == wanted


def test_snapshot_is_whole_and_divided_behind(names: list[str], tmp_path: Path) -> None:
    kept = TextLineDataset(names).snapshot(str(tmp_path))
    with pytest.raises(NotFoundError, match="unshardable source dataset: snapshot"):
        share(kept, "FILE")
    assert read(share(kept, "FILE_OR_DATA", 3)) == records(range(10), [3, 8])


def test_function_error_reaches_user(names: list[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        share(
            Dataset.from_tensor_slices(names).flat_map(
                lambda name: TextLineDataset(name).take(1 // 0)
            ),
            "FILE",
        )


def test_file_records_are_divided_by_element_or_hint(names: list[str]) -> None:
    assert read(share(TextLineDataset(names), "DATA", 3)) == records(range(10), [3, 8])
    assert read(share(TextLineDataset(names).shard(SHARD_HINT, 0), "HINT", 3)) == records(
        range(10), [3, 8]
    )
    hinted = Dataset.from_tensor_slices(names).shard(SHARD_HINT, SHARD_HINT)
    assert read(share(TextLineDataset(hinted), "HINT", 3)) == records([3, 8])


def test_too_few_files_raise_at_each_worker(names: list[str]) -> None:
    few = Dataset.from_tensor_slices(names[:4])
    for index in range(WORKERS):
        for dataset, policy in [
            (TextLineDataset(few), "FILE"),
            (TextLineDataset(few), "FILE_OR_DATA"),
            (TextLineDataset(few.filter(lambda name: True)), "FILE"),
            (TextLineDataset(few.shard(SHARD_HINT, SHARD_HINT)), "HINT"),
        ]:
            with pytest.raises(InvalidArgumentError, match=TOO_FEW):
                read(share(dataset, policy, index))
    assert union(TextLineDataset(few), "DATA") == sorted(records(range(4)))


def test_empty_file_list_is_accepted() -> None:
    assert read(share(TextLineDataset(Dataset.from_tensor_slices(["a"]).take(0)), "FILE")) == []


def test_ignore_errors_ends_shard_of_too_few_files() -> None:
    few = make(ShardOp(5, 1, full=True), [Dataset.range(4)])
    assert read(few.ignore_errors()) == []


def test_state_holds_first_round() -> None:
    dataset = make(ShardOp(4, 1, full=True), [Dataset.range(7)])
    iterator, other = iter(dataset), iter(dataset)
    assert next(iterator) == 1
    other.load_state_dict(iterator.state_dict())
    assert list(map(int, other)) == [5], "the round of which three are left is no first one"


def test_probe_of_function_fills_no_buffer(names: list[str]) -> None:
    computed: list[Any] = []

    def lines(number: Any) -> Tree:
        computed.append(number)
        return TextLineDataset(names[number])

    dataset = (
        Dataset.range(10)
        .map(lambda x: computed.append(x) or x)
        .shuffle(10)
        .prefetch(5)
        .flat_map(lines)
    )
    shard_for_worker(dataset, "FILE", WORKERS, 1)
    assert computed == [0, 0]


def test_error_in_first_round_costs_one_element() -> None:
    dataset = make(
        ShardOp(4, 2, full=True), [Dataset.range(-1, 8).map(lambda x: 12 // int(x))]
    ).ignore_errors()
    assert read(dataset) == [6, 2]


# -- the same order everywhere ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(40).shuffle(40),
        Dataset.range(40).shuffle(40).map(lambda x: x, num_parallel_calls=3, deterministic=False),
        Dataset.sample_from_datasets([Dataset.range(20), Dataset.range(20, 40)]),
        Dataset.range(4).interleave(
            lambda x: Dataset.range(x * 10, x * 10 + 10), 4, 1, 2, deterministic=False
        ),
        Dataset.range(4).flat_map(lambda x: Dataset.range(x * 10, x * 10 + 10).shuffle(10)),
        Dataset.range(40).group_by_window(lambda x: x % 2, lambda key, rows: rows.shuffle(9), 8),
        Dataset.range(4).flat_map(
            lambda x: Dataset.range(10).map(
                lambda y: 10 * x + y, num_parallel_calls=3, deterministic=False
            )
        ),
    ],
    ids=lambda dataset: str(dataset.op.name),
)
def test_unseeded_element_shares_are_disjoint(dataset: Dataset) -> None:
    assert union(dataset, "DATA") == list(range(40))


def test_unseeded_hint_shares_are_disjoint() -> None:
    assert union(Dataset.range(40).shuffle(40).shard(SHARD_HINT, 0), "HINT") == list(range(40))


def test_order_below_shard_ignores_options() -> None:
    options = Options()
    options.deterministic = False
    dataset = Dataset.range(40).map(lambda x: x, num_parallel_calls=4).with_options(options)
    assert union(dataset, "DATA") == list(range(40))


def test_iterations_have_different_orders() -> None:
    dataset = Dataset.range(100).shuffle(100)
    first, again, other = (shard_for_worker(dataset, "DATA", 2, 0, seed) for seed in (1, 1, 2))
    assert read(first) == read(again) != read(other)


def test_sharding_leaves_dataset_unchanged(names: list[str]) -> None:
    dataset = TextLineDataset(names)
    before = dataset.serialize()
    share(dataset, "FILE")
    shard_for_worker(dataset, "FILE", 2, 0)
    assert dataset.serialize() == before


# -- cardinality -----------------------------------------------------------------------------------

POLICIES = ["OFF", "DYNAMIC", "DATA", "FILE_OR_DATA", "FILE", "HINT"]
ENDLESS, UNKNOWN = INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        (Dataset.range(10), [UNKNOWN] * 6),
        (Dataset.range(10).repeat(), [ENDLESS, ENDLESS, ENDLESS, UNKNOWN, UNKNOWN, UNKNOWN]),
        (Dataset.range(0), [0] * 6),
        (Dataset.range(0).shard(SHARD_HINT, SHARD_HINT), [UNKNOWN] * 6),
        (Dataset.range(10).filter(lambda x: True), [UNKNOWN] * 6),
    ],
)
def test_distributed_cardinality(dataset: Dataset, wanted: list[int]) -> None:
    count = dataset.cardinality()
    assert [
        distributed_cardinality(count, policy, coordinated=False) for policy in POLICIES
    ] == wanted
    assert {distributed_cardinality(count, policy, coordinated=True) for policy in POLICIES} == {
        ENDLESS
    }
