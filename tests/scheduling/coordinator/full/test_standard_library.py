"""The standard library's own tests of its ProcessPoolExecutor, with an Executor in its place.

They are run where the Python has them (many do not), and are not copied here. Left out is what
looks into a pool's private attributes, and what is about arguments that an Executor does not have.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import importlib.util
import pkgutil
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduling.coordinator.full import process_pool

pytestmark = [pytest.mark.timeout(300), pytest.mark.shares_cluster]

ROOT = Path(__file__).resolve().parents[4]
NAME = "test.test_concurrent_futures"

PRIVATE = {
    "test_context_manager_shutdown",
    "test_del_shutdown",
    "test_idle_process_reuse_multiple",
    "test_idle_process_reuse_one",
    "test_killed_child",
    "test_processes_terminate",
    "test_python_finalization_error",
    "test_saturation",
    "test_shutdown_deadlock_pickle",
    "test_shutdown_no_wait",
    "test_gh105829_should_not_deadlock_if_wakeup_pipe_full",
    "test_traceback",
    "test_traceback_when_child_process_terminates_abruptly",
    "test_force_shutdown_workers",
    "test_force_shutdown_workers_stops_pool",
}
"""What these look at: the processes, threads and pipes of a pool, and the class of the remote
traceback."""

NOT_OURS = {
    "test_max_tasks_early_shutdown",
    "test_max_tasks_per_child",
    "test_max_tasks_per_child_defaults_to_spawn_context",
    "test_spawn_process_doesnt_hang",
}
"""Of the argument `max_tasks_per_child`, and of how a pool starts processes."""


def modules() -> list[types.ModuleType]:
    """Those that define the tests; none where they are not installed."""
    try:
        if importlib.util.find_spec(NAME) is None:
            return []
        package = importlib.import_module(NAME)
        names = [
            info.name for info in pkgutil.iter_modules(getattr(package, "__path__", []), f"{NAME}.")
        ]
        return [package, *map(importlib.import_module, names)]
    except (ImportError, unittest.SkipTest):
        return []


def flat(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestCase):
            yield item
        else:
            yield from flat(item)


def cases() -> list[Any]:
    params = {}
    for module in modules():
        for case in flat(unittest.TestLoader().loadTestsFromModule(module)):
            name = type(case).__name__
            method = case.id().rpartition(".")[2]
            if (
                name.startswith("ProcessPoolFork")
                and "server" not in name
                and method not in PRIVATE | NOT_OURS
            ):
                params[f"{name}.{method}"] = (module, case)
    return [pytest.param(module, case, id=name) for name, (module, case) in params.items()]


@pytest.fixture(scope="module", autouse=True)
def _the_cluster_is_closed() -> Iterator[None]:
    yield
    process_pool.close()


@pytest.mark.skipif(not modules(), reason=f"this Python comes without {NAME}")
@pytest.mark.parametrize(("module", "case"), cases())
def test_standard_library_test_passes(
    module: types.ModuleType, case: unittest.TestCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test.support import script_helper

    def assert_python_ok(*args: str) -> Any:
        *options, code = args
        code = code.replace(
            "from concurrent.futures import ProcessPoolExecutor",
            f"from {process_pool.__name__} import ProcessPoolExecutor",
        )
        return script_helper.assert_python_ok(
            *options, code, PYTHONPATH=str(ROOT), __isolated=False
        )

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", process_pool.ProcessPoolExecutor)
    monkeypatch.setattr(type(case), "executor_type", process_pool.ProcessPoolExecutor)
    if hasattr(module, "assert_python_ok"):
        monkeypatch.setattr(module, "assert_python_ok", assert_python_ok)
    outcome = unittest.TestResult()
    case.run(outcome)
    texts = [text for _, text in (*outcome.failures, *outcome.errors)]
    assert not texts, "\n".join(texts)
    if outcome.skipped:
        pytest.skip(outcome.skipped[0][1])
