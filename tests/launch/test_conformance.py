"""The local launcher, and the launcher over agents, keep the promises of launchers; tests/engines
checks ssh."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launch.conformance import CHECKS, Rig
from tests.launch.helpers import pipe_hosts
from zmqdist.cluster import ClusterConfig

CONFIG = ClusterConfig.from_dict({"name": "c", "program": ["x"], "jobs": {"worker": {"count": 4}}})


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("launcher", ["local", "agents"])
def test_launcher_keeps_promise(launcher: str, check: Callable[[Rig], None]) -> None:
    with Rig(CONFIG, pipe_hosts("a", "b") if launcher == "agents" else None) as rig:
        check(rig)
