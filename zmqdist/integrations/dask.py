"""`dask_scheduler`: dask computes its graphs on the workers of a cluster. It needs the package dask.

>>> import dask
>>> with dask.config.set(scheduler=zd.dask_scheduler(cluster)):
...     dask.delayed(sum)([dask.delayed(abs)(-1), 2]).compute()
3
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from zmqdist import errors

try:
    from dask._task_spec import Alias, DataNode, convert_legacy_graph
    from dask.core import flatten
    from dask.local import nested_get
    from dask.order import order
except ImportError as error:
    raise ImportError(errors.needs("zmqdist.integrations.dask", "dask>=2024.12")) from error

from zmqdist.scheduling.coordinator.coordinator import (
    ClusterCoordinator,
    independent_coordinator,
)


def dask_scheduler(target: Any = None, **options: Any) -> Callable[..., Any]:
    """Return a scheduler for `dask.config.set(scheduler=...)` or `compute(scheduler=...)`.

    Each task of a graph is one function. Its result stays with the worker that made it until no
    task needs it, and only what `compute` returns comes to the program. Lost results are computed
    again, with what they need (`lineage`).

    Args:
      target: the cluster or the address of its dispatcher; None for the cluster of the environment
        (`zmqdist launch`), or in a function for the one that runs it.
      options: options of the tasks, as of `ClusterCoordinator.options`.

    Raises:
      FailedPreconditionError: there is no target.
    """
    coordinator = independent_coordinator(target)

    def get(graph: Any, keys: Any, **_: Any) -> Any:
        tasks = graph if isinstance(graph, Mapping) else graph.__dask_graph__()
        return _compute(coordinator, options, convert_legacy_graph(tasks), keys)

    return get


def _compute(
    coordinator: ClusterCoordinator, options: dict[str, Any], graph: dict[Any, Any], keys: Any
) -> Any:
    """Return the values of the keys, in lists as the keys are."""
    results = set(flatten([keys]))
    missing = Counter(key for node in graph.values() for key in node.dependencies)
    values: dict[Any, Any] = {}
    unfinished: dict[Any, Any] = {}
    ranks = order(graph)
    try:
        for key in sorted(graph, key=ranks.__getitem__):
            node = graph[key]
            inputs = {name: values[name] for name in node.dependencies}
            if isinstance(node, DataNode):
                values[key] = coordinator.scatter(node.value)
            elif isinstance(node, Alias):
                values[key] = inputs[node.target]
            else:
                work = coordinator.options(lineage=True, name=_name_of(key), **options)
                values[key] = unfinished[key] = work.submit(_run, node, inputs)
                values[key].add_done_callback(lambda _, key=key: unfinished.pop(key, None))
            for name in node.dependencies:
                missing[name] -= 1
                if not missing[name] and name not in results:
                    # the worker frees it when the last task that needs it has ended
                    del values[name]
        return nested_get(keys, {key: values[key].result() for key in results})
    except errors.ClosureInputError as error:
        raise error.original_exception from None
    finally:
        for value in list(unfinished.values()):
            value.cancel()


def _run(node: Any, inputs: dict[Any, Any]) -> Any:
    """Run a task in a slot."""
    return node(inputs)


def _name_of(key: Any) -> str:
    """Return the name of a task without its hash, for errors and status."""
    name = key[0] if isinstance(key, tuple) else key
    return str(name).rpartition("-")[0] or str(name)
