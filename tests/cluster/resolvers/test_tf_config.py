"""TFConfigClusterResolver: first the tests that TensorFlow has, by their names; then its twin, and
what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.resolvers.samples import DEVICES, PS, WORKERS, is_cluster
from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError
from zmqdist.resolvers import TFConfigClusterResolver
from zmqdist.testing import check_resolver

JOBS: dict[str, Any] = {"ps": PS, "worker": WORKERS}
PS0 = {"type": "ps", "index": 0}

FILE = """
name: here
program: python train.py
jobs:
  dispatcher: {address: "127.0.0.1:4040"}
  ps: {tasks: ["127.0.0.1:1", "127.0.0.1:2"]}
  worker: {tasks: {1: "127.0.0.1:3", 4: "127.0.0.1:4"}}
"""


class Env:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def tf_config(self, text: str | None = None, **keys: Any) -> None:
        self._patch.setenv("TF_CONFIG", json.dumps(keys) if text is None else text)

    def zmqdist_config(self, text: str) -> None:
        self._patch.setenv("ZMQDIST_CONFIG", text)


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Env:
    for name in ("TF_CONFIG", "ZMQDIST_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Env(monkeypatch)


def test_normal_cluster_spec_read(env: Env) -> None:
    env.tf_config(cluster=JOBS, task=PS0)
    assert is_cluster(TFConfigClusterResolver().cluster_spec(), JOBS)


@pytest.mark.parametrize(
    ("config", "arguments", "master"),
    [
        ({"cluster": JOBS, "task": PS0}, {}, "ps0:2222"),
        ({"cluster": JOBS, "task": PS0}, {"task_type": "worker", "task_id": 1}, "worker1:2222"),
        ({"cluster": JOBS, "task": PS0, "rpc_layer": "grpc"}, {}, "grpc://ps0:2222"),
        ({"cluster": JOBS, "task": PS0, "rpc_layer": "grpc"}, {"rpc_layer": ""}, "ps0:2222"),
        ({"cluster": JOBS, "task": PS0, "session_master": "a:1", "rpc_layer": "zmq"}, {}, "a:1"),
        ({}, {}, ""),
        ({"cluster": {"worker": ["worker0:2222"]}}, {}, ""),
    ],
)
def test_master(env: Env, config: dict[str, Any], arguments: dict[str, Any], master: str) -> None:
    env.tf_config(**config)
    assert TFConfigClusterResolver().master(**arguments) == master


def test_task_type_index_rpc_read(env: Env) -> None:
    env.tf_config(cluster=JOBS, task=PS0, rpc_layer="grpc")
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "grpc")


def test_parameter_overrides(env: Env) -> None:
    env.tf_config(cluster=JOBS, task={"type": "ps", "index": 1}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver(task_type="ps", task_id=0)
    assert resolver.master() == "grpc://ps0:2222"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 0, "grpc")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "test"
    assert resolver.master() == "test://worker1:2222"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "test")


@pytest.mark.parametrize(
    ("task", "arguments", "expected"),
    [
        ({"type": 123456, "index": 0}, {}, ("123456", 0)),
        ({"type": "ps", "index": "1"}, {}, ("ps", 1)),
        ({"type": "ps", "index": "0"}, {"task_id": 1}, ("ps", 1)),
    ],
)
def test_task_is_text_and_number(
    env: Env, task: dict[str, Any], arguments: dict[str, Any], expected: tuple[str, int]
) -> None:
    env.tf_config(cluster={"123456": PS, **JOBS}, task=task)
    resolver = TFConfigClusterResolver(**arguments)
    assert (resolver.task_type, resolver.task_id) == expected


def test_num_accelerators_filter_tasks_by_env_var(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.tf_config(
        cluster={"worker1": WORKERS, "worker2": WORKERS}, task={"type": "worker1", "index": "0"}
    )
    monkeypatch.setattr(TFConfigClusterResolver, "_device_names", lambda _: DEVICES)
    resolver = TFConfigClusterResolver()
    assert resolver.num_accelerators() == {"TPU": 2, "GPU": 2}
    assert resolver.num_accelerators(task_type="worker2", task_id=3) == {"GPU": 1}
    assert resolver.num_accelerators(task_type="worker2", task_id=4) == {"GPU": 1}


# -- the rest of the contract ----------------------------------------------------------------------


@pytest.mark.usefixtures("env")
def test_empty_cluster_without_variable() -> None:
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    expected = (
        resolver.task_type,
        resolver.task_id,
        resolver.rpc_layer,
        resolver.environment,
        resolver.master(),
    )
    assert expected == (None, None, None, "", "")
    assert resolver.validate() == []


def test_variable_read_at_each_call(env: Env) -> None:
    resolver = TFConfigClusterResolver()
    env.tf_config(cluster=JOBS, task=PS0)
    assert (resolver.task_type, resolver.master()) == ("ps", "ps0:2222")
    env.tf_config(cluster={"worker": WORKERS}, task={"type": "worker", "index": 2})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (
        "worker",
        2,
        "worker2:2222",
    )


def test_sparse_job_of_single_task_has_no_master(env: Env) -> None:
    env.tf_config(cluster={"worker": {"1": "worker1:2222"}})
    resolver = TFConfigClusterResolver()
    assert is_cluster(resolver.cluster_spec(), {"worker": {1: "worker1:2222"}})
    assert resolver.master() == ""


def test_environment_from_argument_or_variable(env: Env) -> None:
    env.tf_config(environment="cloud")
    assert TFConfigClusterResolver().environment == "cloud"
    assert TFConfigClusterResolver(environment="mine").environment == "mine"


@pytest.mark.parametrize("text", ["", "{", "worker0:2222"])
def test_bad_json_error_names_variable(env: Env, text: str) -> None:
    env.tf_config(text)
    resolver = TFConfigClusterResolver()
    for ask in (
        resolver.cluster_spec,
        resolver.master,
        lambda: resolver.task_type,
        lambda: resolver.rpc_layer,
    ):
        with pytest.raises(
            json.JSONDecodeError, match=r"^TF_CONFIG is no JSON; write .* or unset it: "
        ):
            ask()
    assert resolver.validate()[0].startswith("TF_CONFIG is no JSON")


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("[]", ValueError, 'TF_CONFIG must be a JSON object like {"cluster": {...}}, not []'),
        (
            '{"cluster": []}',
            TypeError,
            "TF_CONFIG: cluster: a cluster is a dict of jobs, a ClusterDef or",
        ),
        (
            '{"cluster": {"worker": "a:1"}}',
            TypeError,
            "TF_CONFIG: cluster: the tasks of job 'worker' must be a list",
        ),
        (
            '{"cluster": {"worker": {"x": "a:1"}}}',
            ValueError,
            "TF_CONFIG: cluster: task index 'x' of job 'worker' is no",
        ),
    ],
)
def test_json_that_is_no_cluster_names_the_variable(
    env: Env, text: str, kind: type[Exception], expected: str
) -> None:
    env.tf_config(text)
    with pytest.raises(kind) as caught:
        TFConfigClusterResolver().cluster_spec()
    assert str(caught.value).startswith(expected)


def test_index_must_be_a_number(env: Env) -> None:
    env.tf_config(cluster=JOBS, task={"type": "ps", "index": "first"})
    with pytest.raises(
        ValueError, match="TF_CONFIG: task: the index must be a number, not 'first'"
    ):
        TFConfigClusterResolver().task_id  # noqa: B018
    env.tf_config(cluster=JOBS, task="ps")
    with pytest.raises(
        ValueError,
        match=r'TF_CONFIG: task must be an object like {"type": "worker", "index": 0}, not',
    ):
        TFConfigClusterResolver().task_type  # noqa: B018


@pytest.mark.parametrize("task", [None, {"type": "ps"}, {"index": 0}])
def test_missing_task_error_has_remedy(env: Env, task: Any) -> None:
    env.tf_config(cluster=JOBS, task=task)
    with pytest.raises(
        ValueError, match=r'TF_CONFIG does not say which task this process is; add "task": '
    ):
        TFConfigClusterResolver().master()


def test_index_out_of_range_fails_at_master(env: Env) -> None:
    env.tf_config(cluster=JOBS, task={"type": "worker", "index": 7})
    resolver = TFConfigClusterResolver()
    assert resolver.task_id == 7
    with pytest.raises(ValueError, match="TF_CONFIG: task: job 'worker' has no task with index 7"):
        resolver.master()
    assert resolver.validate() == ["job 'worker' has no task 7; it has 0 to 2"]


def test_evaluator_stands_beside_cluster(env: Env) -> None:
    env.tf_config(
        cluster={"chief": ["c:1"], "worker": WORKERS}, task={"type": "evaluator", "index": 0}
    )
    assert TFConfigClusterResolver().validate() == []


def test_resolver_conforms(env: Env) -> None:
    env.tf_config(cluster=JOBS, task=PS0, rpc_layer="zmq")
    check_resolver(TFConfigClusterResolver())
    env.tf_config(cluster={"worker": ["a:1"]})
    check_resolver(TFConfigClusterResolver())


# -- the twin --------------------------------------------------------------------------------------


def test_zmqdist_config_may_be_json(env: Env) -> None:
    env.zmqdist_config(" " + json.dumps({"cluster": JOBS, "task": PS0, "rpc_layer": "zmq"}))
    assert TFConfigClusterResolver().master() == "zmq://ps0:2222"
    assert ClusterConfig.from_environment() is None, "it is no cluster file"
    env.zmqdist_config("{")
    with pytest.raises(json.JSONDecodeError, match=r"^ZMQDIST_CONFIG is no JSON"):
        TFConfigClusterResolver().cluster_spec()


def test_zmqdist_config_may_name_file(env: Env, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    env.zmqdist_config(str(tmp_path / "cluster.yaml"))
    resolver = TFConfigClusterResolver(task_type="worker", task_id=4)
    cluster = {"ps": ["127.0.0.1:1", "127.0.0.1:2"], "worker": {1: "127.0.0.1:3", 4: "127.0.0.1:4"}}
    assert is_cluster(resolver.cluster_spec(), cluster)  # type: ignore[arg-type]
    assert resolver.master() == "zmq://127.0.0.1:4"
    check_resolver(resolver)


def test_wrong_cluster_file_is_named(env: Env, tmp_path: Path) -> None:
    env.zmqdist_config(str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"gone.yaml:1: .* cannot be read"):
        TFConfigClusterResolver().cluster_spec()
    assert "gone.yaml" in TFConfigClusterResolver().validate()[0]


def test_tf_config_wins_over_its_twin(env: Env) -> None:
    env.zmqdist_config(
        json.dumps({"cluster": {"worker": ["other:1", "other:2"]}, "rpc_layer": "zmq"})
    )
    env.tf_config(cluster=JOBS, task=PS0)
    resolver = TFConfigClusterResolver()
    assert (resolver.cluster_spec().as_dict(), resolver.master()) == (JOBS, "ps0:2222")
