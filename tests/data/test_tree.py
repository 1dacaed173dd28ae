"""Datasets as trees: descriptions, fingerprints, rewriting."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from zmqdist.data import Dataset, Options
from zmqdist.data.dataset import deserialize
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError


def test_description_is_read_without_unpickling() -> None:
    text = Dataset.range(5).map(lambda x: x * 2).batch(2).serialize()
    blob = text.split('"pickle":"')[1].split('"')[0]
    dataset = deserialize(text.replace(blob, "bm90IGEgcGlja2xl"))  # "not a pickle"
    assert dataset.cardinality() == 3
    assert dataset.explain().startswith("batch(size=2): 3 elements")
    assert [each.op.name for each in dataset.walk()] == ["range", "map", "batch"]
    assert dataset.fingerprint()


def test_shared_input_stays_one_node() -> None:
    shuffled = Dataset.range(9).shuffle(9, reshuffle_each_iteration=False)
    back = deserialize(Dataset.zip(shuffled, shuffled).serialize())
    assert len(back.walk()) == 3
    assert all(a == b for a, b in back)


def test_fingerprints_tell_pipelines_apart() -> None:
    def built(count: int, factor: int) -> Dataset:
        return Dataset.range(count).map(lambda x: x * factor).batch(2)

    assert built(5, 2).fingerprint() == built(5, 2).fingerprint()
    assert (
        len({built(5, 2).fingerprint(), built(6, 2).fingerprint(), built(5, 3).fingerprint()}) == 3
    )


def test_unpicklable_function_is_named_at_serialize() -> None:
    lock = threading.Lock()
    dataset = Dataset.range(3).map(lambda x: lock and x)
    assert len(list(dataset)) == 3
    with pytest.raises(FailedPreconditionError, match=r"cannot be serialized.*lock") as caught:
        dataset.serialize()
    assert isinstance(caught.value.__cause__, InvalidArgumentError)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version":99,"nodes":[]}',
        '{"version":1,"nodes":[]}',
        '{"version":1,"nodes":[{"op":"nonsense","args":{},"inputs":[]}]}',
        '{"version":1,"nodes":[{"op":"range","args":{},"inputs":[]}]}',
        '{"version":1,"nodes":[{"op":"batch","args":{"size":2,"drop_remainder":false},"inputs":[7]}]}',
    ],
)
def test_wrong_description_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        deserialize(text)


def test_rewrite_keeps_unchanged_parts() -> None:
    kept = Dataset.range(3).map(abs)
    joined = kept.concatenate(Dataset.range(10, 14)).batch(10)

    def longer(one: Dataset) -> Dataset:
        return one.take(2) if one.op.name == "range" and len(one) == 4 else one

    changed = joined.rewrite(longer)
    assert [x.tolist() for x in changed] == [[0, 1, 2, 10, 11]]
    assert changed.inputs[0].inputs[0] is kept
    assert [len(x) for x in joined] == [7]


def test_array_source_is_explained_briefly() -> None:
    assert (
        Dataset.from_tensor_slices(np.arange(3))
        .explain()
        .startswith("from_tensor_slices(value=array([0, 1, 2])): 3")
    )
    assert (
        Dataset.from_tensor_slices(np.arange(300)).op.one_line()
        == "from_tensor_slices(value=ndarray)"
    )


def test_options_travel() -> None:
    options = Options()
    options.deterministic = False
    options.threading.private_threadpool_size = 2
    back = deserialize(Dataset.range(3).with_options(options).serialize())
    assert back.options() == options
    assert (
        repr(back.options())
        == "Options(deterministic=False, threading={'private_threadpool_size': 2})"
    )


def test_dataset_pickles_and_runs_elsewhere() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(4)}).map(lambda row: row["x"] + 1).batch(4)
    program = "import pickle, sys; print([x.tolist() for x in pickle.load(sys.stdin.buffer)])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(dataset),
        capture_output=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout.decode().strip()) == (0, "[[1, 2, 3, 4]]")


def test_description_is_plain_json() -> None:
    nodes: Any = json.loads(Dataset.range(7).shuffle(3, seed=5).serialize())["nodes"]
    assert nodes[0] == {
        "op": "range",
        "args": {"start": 0, "stop": 7, "step": 1, "dtype": "<i8"},
        "inputs": [],
    }
    assert (nodes[1]["op"], nodes[1]["args"]["size"], nodes[1]["inputs"]) == ("shuffle", 3, [0])


def test_import_of_data_loads_no_sockets() -> None:
    program = "import sys, zmqdist.data; zmqdist.data.Dataset; print('zmq' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50
    )
    assert done.stdout.strip() == "False"
