"""The manifests of configs/kubernetes.yaml as processes: the training succeeds, even when the pod
of a worker is killed and replaced."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.helpers import trained_accuracy
from tests.launch.helpers import Pods, eventually
from zmqdist.cluster import ClusterConfig
from zmqdist.launch.kubernetes import render
from zmqdist.transport.keys import keygen

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("worker_is_killed", [False, True])
def test_pods_of_example_learn_digits(tmp_path: Path, worker_is_killed: bool) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    keygen(tmp_path / "keys")
    secret = {path.name: path.read_text() for path in (tmp_path / "keys").iterdir()}
    (tmp_path / "pods").mkdir()
    text = render(ClusterConfig.load(ROOT / "configs" / "kubernetes.yaml"))
    with Pods(text, secret, tmp_path / "pods", tmp_path) as cluster:
        program = cluster.pods["digits-program"]
        if worker_is_killed:
            eventually(lambda: "epoch  3" in program.output.read_text(), "three epochs", 120.0)
            worker = cluster.pods["digits-worker-1"]
            assert worker.process is not None
            worker.process.send_signal(signal.SIGKILL)
            worker.ended()
            worker.start()  # as the StatefulSet does
        assert program.ended(120.0) == 0, cluster.text()
        assert trained_accuracy(program.output.read_text()) >= 0.95
