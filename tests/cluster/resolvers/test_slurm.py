"""SlurmClusterResolver: first the tests that TensorFlow has, by their names; then nodes without
GPUs, and what goes wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.resolvers.samples import is_cluster
from zmqdist import limits
from zmqdist.cluster.resolvers.hostlist import expand_hostlist, expand_tasks_per_node
from zmqdist.resolvers import SlurmClusterResolver
from zmqdist.testing import check_resolver

NODES = ["t02n13", "t02n41", "t02n43"]
PS_AND_WORKERS = {"ps": 1, "worker": 2}
CLUSTER = {"ps": ["t02n13:8888"], "worker": ["t02n41:8888", "t02n43:8888"]}


class Slurm:
    """Slurm's variables for this process."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            patch.delenv(name)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")

    def says(self, **variables: Any) -> None:
        for name, value in variables.items():
            self._patch.setenv(name if name.startswith("CUDA") else f"SLURM_{name}", str(value))


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(monkeypatch)


def three_nodes(slurm: Slurm, rank: int = 0, **variables: Any) -> None:
    slurm.says(PROCID=rank, STEP_NUM_TASKS=3, STEP_NODELIST="t02n[13,41,43]", **variables)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1,3]", ["n1", "n3"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("n[0001-0003],m5,o[009-011]", ["n0001", "n0002", "n0003", "m5", "o009", "o010", "o011"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        (
            "rack[1-2]n[08-10]",
            [f"rack{rack}n{node}" for rack in (1, 2) for node in ("08", "09", "10")],
        ),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("[1-2].example.org", ["1.example.org", "2.example.org"]),
        ("n[5,4-4]", ["n5", "n4"]),
    ],
)
def test_expand_hostlist(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("13(x10)", [13] * 10),
    ],
)
def test_expand_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_tasks_per_node(text) == counts


def test_simple_retrieval_from_env(slurm: Slurm) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)", CUDA_VISIBLE_DEVICES="0")
    resolver = SlurmClusterResolver()
    assert is_cluster(resolver.cluster_spec(), {"worker": [f"{node}:8888" for node in NODES]})
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_simple_successful_retrieval(slurm: Slurm) -> None:
    three_nodes(slurm)
    resolver = SlurmClusterResolver(
        jobs=PS_AND_WORKERS,
        port_base=8888,
        tasks_per_node=1,
        gpus_per_node=1,
        gpus_per_task=1,
        auto_set_gpu=False,
    )
    assert is_cluster(resolver.cluster_spec(), CLUSTER)  # type: ignore[arg-type]


def test_simple_master_retrieval(slurm: Slurm) -> None:
    three_nodes(slurm)
    resolver = SlurmClusterResolver(
        jobs=PS_AND_WORKERS,
        tasks_per_node=1,
        gpus_per_node=1,
        gpus_per_task=1,
        auto_set_gpu=False,
        rpc_layer="grpc",
    )
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.master() == "grpc://t02n43:8888"
    resolver.rpc_layer = "ab"
    assert resolver.master("ps", 0) == "ab://t02n13:8888"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://t02n13:8888"
    assert resolver.get_task_info() == ("worker", 1), (
        "what was set stays (TensorFlow puts the rank's task in its place)"
    )


def test_tasks_per_node_of_variable(slurm: Slurm) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)")
    resolver = SlurmClusterResolver(
        jobs=PS_AND_WORKERS, gpus_per_node=1, gpus_per_task=1, auto_set_gpu=False
    )
    assert is_cluster(resolver.cluster_spec(), CLUSTER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("per_node", "per_task", "visible", "accelerators"),
    [(2, 1, "1", {"GPU": 1}), (4, 2, "2,3", {"GPU": 2})],
)
def test_gpus_of_task_on_shared_node(
    slurm: Slurm, per_node: int, per_task: int, visible: str, accelerators: dict[str, int]
) -> None:
    slurm.says(
        PROCID=1, STEP_NUM_TASKS=5, STEP_NODELIST="t02n[13,41,43]", STEP_TASKS_PER_NODE="2(x2),1"
    )
    resolver = SlurmClusterResolver({"ps": 1, "worker": 4}, 8888, per_node, per_task)
    workers = ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"]
    assert is_cluster(resolver.cluster_spec(), {"ps": ["t02n13:8888"], "worker": workers})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert resolver.get_task_info() == ("worker", 0)
    assert resolver.num_accelerators() == accelerators


# -- host lists ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[1",
        "n1]",
        "a,,b",
        ",a",
        "a,",
        "n[]",
        "n[1-2-3]",
        "n[3-1]",
        "n[a]",
        "n[1,,2]",
        "n[[1]]",
        "a b",
        "n[-1]",
    ],
)
def test_bad_host_list_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no host list"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["", "x2", "3(x2", "3(2)", "3(x2),", "-1", "1.5"])
def test_bad_task_list_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no list of tasks per node"):
        expand_tasks_per_node(text)


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-9999],m[1-2]", "a[1-9999]b[1-9999]c[1-9999]"]
)
def test_short_text_for_too_many_nodes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"more than {limits.WORKERS_MAX} nodes"):
        expand_hostlist(text)
    with pytest.raises(ValueError, match=f"more than {limits.WORKERS_MAX} nodes"):
        expand_tasks_per_node("1,1(x999999999)")


# -- without GPUs, with some of them ---------------------------------------------------------------


def test_nodes_without_gpus_keep_environment(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TensorFlow needs an nvidia-smi, and fails with gpus_per_node=0."""
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    for resolver in (SlurmClusterResolver(), SlurmClusterResolver(gpus_per_node=0)):
        assert is_cluster(resolver.cluster_spec(), {"worker": [f"{node}:8888" for node in NODES]})
        assert resolver.num_accelerators() == {}
        assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_task_gets_visible_gpus(slurm: Slurm) -> None:
    slurm.says(
        PROCID=1,
        STEP_NUM_TASKS=2,
        STEP_NODELIST="n1",
        STEP_TASKS_PER_NODE="2",
        CUDA_VISIBLE_DEVICES="4,5,6,7",
    )
    resolver = SlurmClusterResolver()
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_more_gpus_than_a_node_has_is_a_runtime_error(slurm: Slurm) -> None:
    slurm.says(PROCID=0, STEP_NUM_TASKS=2, STEP_NODELIST="n1", STEP_TASKS_PER_NODE="2")
    with pytest.raises(RuntimeError, match="2 tasks with 2 GPUs each need more than the 3 GPUs"):
        SlurmClusterResolver(gpus_per_node=3, gpus_per_task=2)


# -- which task am I -------------------------------------------------------------------------------


def test_own_task_known_at_once(slurm: Slurm) -> None:
    """In TensorFlow it is None before `cluster_spec`, so that a program that looks at it first
    takes itself for the chief."""
    for rank, task in enumerate([("chief", 0), ("ps", 0), ("worker", 0)]):
        three_nodes(slurm, rank=rank, STEP_TASKS_PER_NODE="1(x3)")
        resolver = SlurmClusterResolver(jobs={"chief": 1, "ps": 1, "worker": 1})
        assert (resolver.task_type, resolver.task_id) == task


def test_task_info_unknown_before_cluster_spec(slurm: Slurm) -> None:
    three_nodes(slurm, rank=2, STEP_TASKS_PER_NODE="1(x3)")
    resolver = SlurmClusterResolver(jobs=PS_AND_WORKERS)
    assert (resolver.get_task_info(), resolver.master(), resolver.environment) == (
        (None, None),
        "",
        "",
    )
    resolver.cluster_spec()
    assert (resolver.get_task_info(), resolver.master()) == (("worker", 1), "zmq://t02n43:8888")


def test_jobs_share_out_the_tasks_in_the_order_of_their_names(slurm: Slurm) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)")
    resolver = SlurmClusterResolver(jobs={"worker": 1, "chief": 1, "ps": 1}, port_base=5000)
    assert resolver.cluster_spec().as_dict() == {
        job: [f"{node}:5000"] for job, node in zip(("chief", "ps", "worker"), NODES, strict=True)
    }


def test_hosts_in_order_of_names_or_node_list(slurm: Slurm) -> None:
    slurm.says(PROCID=0, STEP_NUM_TASKS=3, STEP_NODELIST="n[9-10]", STEP_TASKS_PER_NODE="2,1")
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == [
        "n10:8888",
        "n9:8888",
        "n9:8889",
    ]
    resolver = SlurmClusterResolver(order="nodelist")
    assert resolver.cluster_spec().job_tasks("worker") == ["n9:8888", "n9:8889", "n10:8888"]
    with pytest.raises(ValueError, match=r'order must be "name" or "nodelist", not .rank'):
        SlurmClusterResolver(order="rank")  # type: ignore[arg-type]


def test_validate_sees_a_task_whose_address_is_on_another_host(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.says(PROCID=0, STEP_NUM_TASKS=2, STEP_NODELIST="n[9-10]", STEP_TASKS_PER_NODE="1(x2)")
    monkeypatch.setenv("SLURMD_NODENAME", "n9")
    (problem,) = SlurmClusterResolver().validate()
    assert problem.startswith('rank 0 has an address at n10, but this is n9: pass order="nodelist"')
    assert SlurmClusterResolver(order="nodelist").validate() == []


def test_tasks_of_each_host_may_be_given(slurm: Slurm) -> None:
    slurm.says(PROCID=2)
    resolver = SlurmClusterResolver(jobs={"worker": 3}, tasks_per_node={"big": 2, "small": 1})
    assert resolver.cluster_spec().job_tasks("worker") == ["big:8888", "big:8889", "small:8888"]
    assert resolver.get_task_info() == ("worker", 2)


def test_hooks_may_be_overridden_for_what_is_like_slurm(slurm: Slurm) -> None:
    class Other(SlurmClusterResolver):
        def _resolve_own_rank(self) -> int:
            return 1

        def _resolve_num_tasks(self) -> int:
            return 2

        def _resolve_hostlist(self) -> list[str]:
            return ["a", "b"]

    resolver = Other(tasks_per_node=1)
    assert resolver.cluster_spec().as_dict() == {"worker": ["a:8888", "b:8888"]}
    assert resolver.get_task_info() == ("worker", 1)


def test_variables_of_the_job_stand_in_for_those_of_the_step(slurm: Slurm) -> None:
    slurm.says(PROCID=0, NTASKS=3, JOB_NODELIST="n[1-2]", TASKS_PER_NODE="2,1")
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == [
        "n1:8888",
        "n1:8889",
        "n2:8888",
    ]


def test_resolver_conforms(slurm: Slurm) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)", CUDA_VISIBLE_DEVICES="0")
    check_resolver(SlurmClusterResolver(jobs=PS_AND_WORKERS))


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("SLURM_PROCID", "SLURM_PROCID is not set: is this a task of srun?"),
        (
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NUM_TASKS or SLURM_NTASKS is not set: is this a task of srun?",
        ),
        (
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST is not set: is this a task of srun?",
        ),
        (
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not set: is this",
        ),
    ],
)
def test_absent_variable_is_named(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch, missing: str, expected: str
) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)")
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError) as caught:
        SlurmClusterResolver()
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PROCID": "first"}, "SLURM_PROCID must be a number, not 'first'"),
        ({"STEP_NODELIST": "n[1"}, "SLURM_STEP_NODELIST: 'n[1' is no host list"),
        (
            {"STEP_TASKS_PER_NODE": "x"},
            "SLURM_STEP_TASKS_PER_NODE: 'x' is no list of tasks per node",
        ),
        (
            {"STEP_TASKS_PER_NODE": "1,2"},
            "SLURM_STEP_TASKS_PER_NODE is '1,2', for 2 nodes, but the list of nodes has 3",
        ),
        (
            {"STEP_NUM_TASKS": "4"},
            "the jobs (worker: 4) have 4 tasks together, but Slurm gives 3: change jobs, or",
        ),
        (
            {"PROCID": "3"},
            (
                "SLURM_PROCID is 3, but there are 3 tasks, with the numbers 0 to 2: is this a part of "
                "a heterogeneous job?"
            ),
        ),
        ({"PROCID": "-1"}, "SLURM_PROCID is -1, but there are 3 tasks"),
    ],
)
def test_variables_that_make_no_sense_are_a_runtime_error(
    slurm: Slurm, variables: dict[str, str], expected: str
) -> None:
    three_nodes(slurm, STEP_TASKS_PER_NODE="1(x3)")
    slurm.says(**variables)
    with pytest.raises(RuntimeError) as caught:
        SlurmClusterResolver()
    assert str(caught.value).startswith(expected)


def test_jobs_that_do_not_fill_the_tasks_are_a_runtime_error(slurm: Slurm) -> None:
    three_nodes(slurm)
    with pytest.raises(
        RuntimeError,
        match=r"the jobs \(ps: 1, worker: 2\) have 3 tasks together, but Slurm gives 6",
    ):
        SlurmClusterResolver(jobs=PS_AND_WORKERS, tasks_per_node=2)


@pytest.mark.parametrize(
    ("port_base", "text"),
    [
        (
            68887,
            (
                "port_base is 68887, and the tasks of a host have the ports up to 68888: wants 1 to "
                "65535"
            ),
        ),
        (65535, "up to 65536"),
        (0, "port_base is 0"),
        ("8888", "port_base is '8888', wants a whole number"),
        (True, "port_base is True, wants a whole number"),
    ],
)
def test_ports_that_do_not_exist_are_refused(slurm: Slurm, port_base: Any, text: str) -> None:
    three_nodes(slurm)
    with pytest.raises(ValueError, match=text):
        SlurmClusterResolver(jobs={"worker": 6}, port_base=port_base, tasks_per_node=2)
