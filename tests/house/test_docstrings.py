"""The examples in the docstrings of public names run, and print what they say; no public callable
lacks one."""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.cluster.resolvers.test_kubernetes import LABEL, Client, pod
from tests.data.examples import record
from tests.house.test_public_names import LISTED

pytestmark = pytest.mark.shares_cluster


def public() -> dict[str, Any]:
    """The public modules, and by module and name the classes and functions in them, with the
    methods of the classes.

    A method without a docstring has that of the class above it, and is left out.
    """
    found: dict[str, Any] = {}
    for module_name in LISTED:
        module = importlib.import_module(module_name)
        found[module_name] = module
        for value in (getattr(module, name) for name in module.__all__):
            if inspect.isclass(value) or inspect.isroutine(value):
                found |= {
                    f"{part.__module__}.{part.__qualname__}": part
                    for part in (value, *methods(value))
                }
    return found


def methods(value: Any) -> Iterator[Any]:
    """The public methods of a class, its own and those of its bases in zmqdist."""
    for base in getattr(value, "__mro__", ()):
        if base.__module__.startswith("zmqdist"):
            functions = {
                name: getattr(member, "__func__", member) for name, member in vars(base).items()
            }
            yield from (
                part
                for name, part in functions.items()
                if name[0] != "_" and inspect.isfunction(part) and part.__doc__
            )


PUBLIC = public()
EXAMPLES = {name: value.__doc__ for name, value in PUBLIC.items() if ">>>" in (value.__doc__ or "")}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the examples may use without making it.

    A `cluster` of two workers and two parameter servers, its `coordinator` and `strategy`; a
    `client` of an RPC server; a `task`, which is a server alone in its cluster; `core_v1`, a client
    of Kubernetes that lists two pods; the name of an empty `folder`; the path of the TFRecord file
    `records`.
    """
    records = tmp_path_factory.mktemp("records") / "two"
    records.write_bytes(record(b"one") + record(b"two"))
    server = zd.rpc.Server.create("zmq", "127.0.0.1:0")
    server.register("scale", scale)
    server.register("count", count)
    with (
        server,
        zd.local_cluster(workers=2, ps=2) as cluster,
        zd.ParameterServerStrategy(cluster) as strategy,
        zd.Server.create_local_server() as task,
    ):
        coordinator = strategy.coordinator
        # All connections are made before a test counts them.
        coordinator.gather(coordinator.map(abs, range(8)), timeout=30)
        client = zd.rpc.Client.create("zmq", server.address)
        yield {
            "zd": zd,
            "np": np,
            "Dataset": zd.data.Dataset,
            "cluster": cluster,
            "strategy": strategy,
            "coordinator": coordinator,
            "task": task,
            "client": client,
            "core_v1": Client({LABEL: [pod("w-1", "10.0.0.1"), pod("w-2", "10.0.0.2")]}),
            "folder": str(tmp_path_factory.mktemp("examples")),
            "records": str(records),
        }
        client.close()


def scale(array: Any, by: int = 2) -> Any:
    return array * by


def count(end: int) -> Iterator[int]:
    yield from range(int(end))


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_docstring_examples_print_as_stated(name: str, names: dict[str, Any]) -> None:
    if "import pyarrow" in EXAMPLES[name]:
        pytest.importorskip("pyarrow")
    case = doctest.DocTestParser().get_doctest(EXAMPLES[name], dict(names), name, None, 0)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(case, out=output.append)
    assert not runner.failures, "".join(output)


def test_public_callables_have_examples() -> None:
    """A module and an exception need none: a program calls neither."""
    callables = {
        name: value
        for name, value in PUBLIC.items()
        if not inspect.ismodule(value)
        and not (inspect.isclass(value) and issubclass(value, BaseException))
    }
    assert not [name for name, value in callables.items() if ">>>" not in (value.__doc__ or "")]
