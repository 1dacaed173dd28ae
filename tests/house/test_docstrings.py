"""The examples in the docstrings of public names run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import zmqdist as zd
from tests.house.test_public_names import LISTED

pytestmark = pytest.mark.shares_cluster

FINDER = doctest.DocTestFinder(exclude_empty=True)


def examples() -> dict[str, doctest.DocTest]:
    """The examples by the name of what they belong to: the public modules, and the public classes and functions in them."""
    found: dict[str, doctest.DocTest] = {}
    for module_name in LISTED:
        module = importlib.import_module(module_name)
        own = doctest.DocTestParser().get_doctest(module.__doc__ or "", {}, module_name, module.__file__, 0)
        found |= {module_name: own} if own.examples else {}
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                cases = FINDER.find(value, value.__name__, globs={})
                found |= {f"{case.name} in {value.__module__}": case for case in cases if case.examples}
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the examples may use without making it: a `cluster` of two workers, and its `coordinator`."""
    with zd.local_cluster(workers=2, processes=False) as cluster, zd.ClusterCoordinator(cluster) as coordinator:
        coordinator.gather(
            coordinator.map(abs, range(8)), timeout=30
        )  # all connections are made before a test counts them
        yield {"zd": zd, "cluster": cluster, "coordinator": coordinator}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_of_docstrings_print_what_they_say(name: str, names: dict[str, Any]) -> None:
    EXAMPLES[name].globs.update(names)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    runner.run(EXAMPLES[name], out=output.append)
    assert not runner.failures, "".join(output)
