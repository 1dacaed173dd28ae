"""Pipelines that depend on more than they say: found, and warned of, let pass or refused."""

from __future__ import annotations

import functools
import warnings
from enum import Enum
from typing import Any

import pytest

from zmqdist.data import Dataset, Options
from zmqdist.data.dataset import deserialize
from zmqdist.data.external_state import check_external_state, stateful, stateful_operators
from zmqdist.errors import FailedPreconditionError, InvalidArgumentError


class Policy(Enum):
    """As another library names them."""

    WARN = 0
    IGNORE = 1
    FAIL = 2


def under(policy: Any, dataset: Dataset) -> Dataset:
    options = Options()
    options.experimental_external_state_policy = policy
    return dataset.with_options(options)


@stateful
def counted(x: Any) -> Any:
    return x


ONE = Dataset.range(3)


@pytest.mark.parametrize(
    ("dataset", "names"),
    [
        (Dataset.random(), ["random"]),
        (Dataset.random(seed=1), []),
        (Dataset.sample_from_datasets([ONE, ONE]), ["selector"]),
        (Dataset.sample_from_datasets([ONE, ONE], seed=1), []),
        (ONE.rejection_resample(lambda x: 0, [1.0]), ["rejection_resample"]),
        (ONE.rejection_resample(lambda x: 0, [1.0], seed=3), []),
        (ONE.shuffle(3), []),
        (ONE.map(lambda x: x), []),
        (ONE.map(counted), ["map"]),
        (ONE.map(stateful(functools.partial(counted))).batch(2), ["map"]),
        (ONE.filter(counted).map(counted), ["filter", "map"]),
        (Dataset.zip(Dataset.random(), Dataset.random()), ["random", "random"]),
    ],
    ids=lambda value: value.op.one_line() if isinstance(value, Dataset) else None,
)
def test_stateful_operators_are_named(dataset: Dataset, names: list[str]) -> None:
    assert [text.split("(")[0] for text in stateful_operators(dataset)] == names


def test_marked_function_is_same_function() -> None:
    assert stateful(counted) is counted


def test_check_unpickles_nothing() -> None:
    text = ONE.map(lambda x: x + 1).serialize()
    blob = text.split('"pickle":"')[1].split('"')[0]
    assert stateful_operators(deserialize(text.replace(blob, "AAAA"))) == []


@pytest.mark.parametrize("policy", [None, "WARN", "warn", Policy.WARN])
def test_warning_names_stateful_operators(policy: Any) -> None:
    with pytest.warns(UserWarning, match=r"external state.*random\(.*Give a seed"):
        check_external_state(under(policy, Dataset.random()))


@pytest.mark.parametrize("policy", ["FAIL", Policy.FAIL])
def test_policy_fail_raises(policy: Any) -> None:
    with pytest.raises(FailedPreconditionError, match=r"external state.*random\("):
        check_external_state(under(policy, Dataset.random()))


@pytest.mark.parametrize(
    ("policy", "dataset"),
    [("IGNORE", Dataset.random()), (Policy.IGNORE, Dataset.random()), ("FAIL", ONE), (None, ONE)],
)
def test_policy_ignore_is_silent(policy: Any, dataset: Dataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_external_state(under(policy, dataset))


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one of WARN, IGNORE, FAIL, not 'NEVER'"):
        check_external_state(under("NEVER", ONE))


def test_policy_travels_by_name() -> None:
    options = deserialize(under(Policy.FAIL, ONE).serialize()).options()
    assert options.experimental_external_state_policy == "FAIL"
