"""Programs of another version of the protocol."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import zmqdist as zd
from tests.scheduling.work import until
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.wire.hello import PROTOCOL

NEWER = r"""
import importlib.util, re, sys
spec = importlib.util.find_spec("zmqdist.wire.hello")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
text = open(spec.origin).read()
newer, count = re.subn(r"(?m)^PROTOCOL(.*) = .*$", r"PROTOCOL\1 = (9, 0)", text)
assert count == 1
exec(compile(newer, spec.origin, "exec"), module.__dict__)

from zmqdist.coordinator import ClusterCoordinator
from zmqdist.scheduling.shared.config import WorkerConfig
from zmqdist.launch.roles import run_worker
what, address = sys.argv[1:]
if what == "worker":
    sys.exit(run_worker(WorkerConfig(address)))
with ClusterCoordinator(address) as coordinator:
    try:
        coordinator.schedule(int).get(20)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(("what", "code"), [("worker", 2), ("coordinator", 1)])
def test_protocol_mismatch_names_both_versions(
    what: str, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    with zd.DispatchServer() as dispatcher:
        done = subprocess.run(
            [sys.executable, "-c", NEWER, what, dispatcher.address],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == code
        ours = re.escape(".".join(map(str, PROTOCOL)))
        assert re.search(
            rf"protocol {ours}, this side 9\.0.*install the same zmqdist on both ends", done.stderr
        )
        assert dispatcher.num_workers == 0
        until(lambda: "protocol 9.0" in caplog.text)
        with zd.WorkerServer(WorkerConfig(dispatcher.address)):
            assert dispatcher.num_workers == 1
