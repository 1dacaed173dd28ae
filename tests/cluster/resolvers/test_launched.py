"""In a process that `zmqdist launch` started, every resolver describes the launcher's cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from zmqdist.cluster import ClusterConfig
from zmqdist.cluster.file_sections import RuntimeConfig
from zmqdist.cluster.resolvers.base import ClusterResolver
from zmqdist.resolvers import (
    ExecutableLocation,
    KubernetesClusterResolver,
    RankClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
)
from zmqdist.testing import check_resolver
from zmqdist.training.cluster_connection import (
    _is_launched,
)  # reach: what a strategy asks of a resolver before it connects

PS = ["127.0.0.1:5001", "127.0.0.1:5002"]

EACH_RESOLVER = pytest.mark.parametrize(
    "make",
    [TFConfigClusterResolver, SlurmClusterResolver, RankClusterResolver, KubernetesClusterResolver],
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], None]:
    """Set the variables that a task of a launched cluster has, in an allocation of Slurm whose own
    numbers are others."""

    def task(job: str, index: int) -> None:
        config = ClusterConfig.from_dict(
            {"name": "x", "jobs": {"worker": {"count": 2}, "ps": {"tasks": PS}}, "program": "true"}
        )
        running = msgspec.structs.replace(
            config, runtime=RuntimeConfig(dispatcher="zmq://127.0.0.1:5000")
        )
        path = tmp_path / "cluster.yaml"
        path.write_text(running.to_yaml())
        monkeypatch.setenv("ZMQDIST_CONFIG", str(path))
        monkeypatch.setenv("TF_CONFIG", config.tf_config(job, index))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        slurm = {
            "PROCID": 0,
            "STEP_NUM_TASKS": 9,
            "STEP_NODELIST": "n[1-9]",
            "STEP_TASKS_PER_NODE": "1(x9)",
        }
        for name, value in slurm.items():
            monkeypatch.setenv(f"SLURM_{name}", str(value))

    return task


@EACH_RESOLVER
def test_resolver_has_launched_cluster_and_task(
    launched: Callable[[str, int], None], make: Callable[[], ClusterResolver]
) -> None:
    for task in (("chief", 0), ("worker", 1), ("ps", 1)):
        launched(*task)
        resolver = make()
        assert (resolver.task_type, resolver.task_id) == task
        assert resolver.cluster_spec().as_dict() == {"ps": PS}
        assert _is_launched(resolver)
        check_resolver(resolver)


@pytest.mark.parametrize(
    "make", [SlurmClusterResolver, RankClusterResolver, KubernetesClusterResolver]
)
def test_task_without_address_has_no_master(
    launched: Callable[[str, int], None], make: Callable[[], ClusterResolver]
) -> None:
    launched("chief", 0)
    resolver = make()
    resolver.cluster_spec()
    assert (resolver.master(), resolver.master("ps", 1)) == ("", "zmq://127.0.0.1:5002")


def test_file_without_runtime_does_not_count(
    launched: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched("chief", 0)
    path = tmp_path / "written.yaml"
    path.write_text("name: x\njobs: {worker: {count: 1}}\nprogram: 'true'\n")
    monkeypatch.setenv("ZMQDIST_CONFIG", str(path))
    assert SlurmClusterResolver().cluster_spec().num_tasks("worker") == 9


def test_launched_program_finds_foreign_pods(
    launched: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kubernetes")
    launched("chief", 0)
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(RuntimeError, match="there is no kubeconfig"):
        KubernetesClusterResolver(executable_location=ExecutableLocation.OFF_CLUSTER)


def test_own_client_finds_pods_when_launched(
    launched: Callable[[str, int], None],
) -> None:
    launched("chief", 0)
    pod = SimpleNamespace(
        metadata=SimpleNamespace(name="a"),
        status=SimpleNamespace(phase="Running", host_ip="10.0.0.1"),
    )
    client = SimpleNamespace(list_pod_for_all_namespaces=lambda **_: SimpleNamespace(items=[pod]))
    resolver = KubernetesClusterResolver(override_client=client)
    assert (resolver.cluster_spec().as_dict(), resolver.task_type) == (
        {"worker": ["10.0.0.1:8470"]},
        None,
    )
