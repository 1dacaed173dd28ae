"""Modules that workers do not have: sent by value, and anew once they were edited."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest

import zmqdist as zd
from zmqdist.coordinator import ClusterCoordinator, send_by_value
from zmqdist.errors import FailedPreconditionError

HELPERS = """
from beside_helpers import part
FACTOR = {factor}

class Scale:
    def __init__(self, value):
        self.value = value * FACTOR

def scaled(value):
    return Scale(value).value + part.ONE - 1
"""


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that only this program finds: workers have started before it is on the path."""
    (tmp_path / "beside_helpers").mkdir()
    (tmp_path / "beside_helpers" / "__init__.py").write_text("")
    (tmp_path / "beside_helpers" / "part.py").write_text("ONE = 1\n")
    (tmp_path / "edited_helpers.py").write_text(HELPERS.format(factor=2))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("edited_helpers")
    yield module
    for name in ("edited_helpers", "beside_helpers"):
        if name in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
    for name in ("edited_helpers", "beside_helpers", "beside_helpers.part"):
        del sys.modules[name]


@pytest.fixture
def coordinator() -> Iterator[ClusterCoordinator]:
    with zd.local_cluster(workers=1) as cluster, ClusterCoordinator(cluster) as coordinator:
        yield coordinator


def test_module_missing_at_worker_is_sent_by_value(
    coordinator: ClusterCoordinator, helpers: ModuleType
) -> None:
    with pytest.raises(FailedPreconditionError, match="send_by_value"):
        coordinator.schedule(helpers.scaled, (3,)).get(30)
    send_by_value(helpers)
    send_by_value("beside_helpers")
    assert coordinator.schedule(helpers.scaled, (3,)).get(30) == 6
    assert coordinator.schedule(lambda: helpers.scaled(4)).get(30) == 8
    assert coordinator.schedule(lambda scale: scale.value, (helpers.Scale(5),)).get(30) == 10


def test_edited_module_is_sent_anew_after_reload(
    coordinator: ClusterCoordinator, helpers: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    send_by_value(helpers)
    send_by_value("beside_helpers")
    assert helpers.__file__ is not None
    with caplog.at_level(logging.WARNING):
        for factor in (2, 3, 4):
            Path(helpers.__file__).write_text(HELPERS.format(factor=factor))
            importlib.reload(helpers)
            assert coordinator.schedule(helpers.scaled, (1,)).get(30) == factor
            assert coordinator.schedule(lambda: helpers.scaled(2)).get(30) == 2 * factor
    assert "was reloaded" not in caplog.text


def test_send_by_value_refuses_unimported_module() -> None:
    with pytest.raises(
        ValueError, match="no module 'not_imported' has been imported: import it first"
    ):
        send_by_value("not_imported")
    with pytest.raises(TypeError, match=r"takes a module or its name, not function"):
        send_by_value(lambda: None)  # type: ignore[arg-type]
