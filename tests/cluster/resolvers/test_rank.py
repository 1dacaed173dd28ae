"""RankClusterResolver: torchrun, Open MPI and PMI; where the hosts come from; what is missing or
does not agree."""

from __future__ import annotations

import os
from typing import Any

import pytest

from zmqdist.cluster.resolvers.rank import FAMILIES
from zmqdist.resolvers import RankClusterResolver
from zmqdist.testing import check_resolver

NAMES = {name for family in FAMILIES for names in family[1:] for name in names}

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
CRAY = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")

ALL_FAMILIES = pytest.mark.parametrize(
    "names", [TORCHRUN, OPEN_MPI, MPICH, CRAY], ids=["torchrun", "open-mpi", "mpich", "cray"]
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name in NAMES or name.startswith("SLURM") or name in ("TF_CONFIG", "ZMQDIST_CONFIG"):
            monkeypatch.delenv(name)


def started(patch: pytest.MonkeyPatch, names: tuple[str, ...], *values: Any) -> None:
    """Set rank, size, local rank and local size."""
    for name, value in zip(names, values, strict=True):
        patch.setenv(name, str(value))


@ALL_FAMILIES
def test_rank_0_is_the_chief(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    for rank, task in enumerate([("chief", 0), ("worker", 0), ("worker", 1)]):
        started(monkeypatch, names, rank, 3, rank, 3)
        resolver = RankClusterResolver()
        assert (resolver.task_type, resolver.task_id) == task
        assert resolver.cluster_spec().as_dict() == {
            "chief": ["127.0.0.1:8888"],
            "worker": ["127.0.0.1:8889", "127.0.0.1:8890"],
        }
        assert resolver.master() == f"zmq://127.0.0.1:{8888 + rank}"
        assert resolver.validate() == []
        check_resolver(resolver)


def test_jobs_take_ranks_in_order_of_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started(monkeypatch, OPEN_MPI, 2, 4, 0, 2)
    resolver = RankClusterResolver({"worker": 2, "ps": 1}, hosts=["b", "a"], port_base=5000)
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["b:5000"],
        "ps": ["b:5001"],
        "worker": ["a:5000", "a:5001"],
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    check_resolver(resolver)


def test_hosts_may_have_different_numbers_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, MPICH, 3, 4, 0, 1)
    resolver = RankClusterResolver(hosts={"big": 3, "small": 1})
    assert resolver.cluster_spec().job_tasks("worker") == ["big:8889", "big:8890", "small:8888"]
    assert resolver.validate() == []


def test_hosts_of_outer_slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, TORCHRUN, 3, 4, 1, 2)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[9-10]")
    assert RankClusterResolver().cluster_spec().as_dict() == {
        "chief": ["n9:8888"],
        "worker": ["n9:8889", "n10:8888", "n10:8889"],
    }


def test_torchrun_counts_before_the_mpirun_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, OPEN_MPI, 1, 2, 0, 1)
    started(monkeypatch, TORCHRUN, 0, 2, 0, 2)
    assert RankClusterResolver().task_type == "chief"
    monkeypatch.delenv("WORLD_SIZE")
    assert RankClusterResolver(hosts=["a", "b"]).task_type == "worker", (
        "torchrun's are not complete"
    )


def test_validate_sees_ranks_that_go_round_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, OPEN_MPI, 1, 4, 0, 2)
    (problem,) = RankClusterResolver(hosts=["a", "b"]).validate()
    assert problem.startswith(
        "rank 1 has the address of process 1 at a, but is process 0 of its host: start as many"
    )


@ALL_FAMILIES
def test_absent_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    for absent in names[1:]:
        started(monkeypatch, names, 0, 1, 0, 1)
        monkeypatch.delenv(absent)
        with pytest.raises(RuntimeError) as caught:
            RankClusterResolver()
        assert str(caught.value).startswith(f"{names[0]} is set, but ")
        assert absent in str(caught.value)


def test_families_are_named_without_variables() -> None:
    with pytest.raises(RuntimeError) as caught:
        RankClusterResolver()
    assert str(caught.value) == (
        "none of these are set: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (torchrun); "
        "OMPI_COMM_WORLD_RANK, "
        "OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE (Open MPI); "
        "PMI_RANK, PMI_SIZE, "
        "MPI_LOCALRANKID or PMI_LOCAL_RANK, MPI_LOCALNRANKS or PMI_LOCAL_SIZE (PMI); is this a "
        "process of mpirun or torchrun?"
    )


@pytest.mark.parametrize(
    ("values", "arguments", "expected"),
    [
        (("first", 2, 0, 2), {}, "RANK must be a number, not 'first'"),
        ((2, 2, 0, 2), {}, "RANK is 2, but there are 2 processes, with the ranks 0 to 1"),
        (
            (0, 4, 0, 2),
            {},
            (
                "torchrun has started 4 processes, 2 of them on this host, and does not tell the "
                "names of the hosts"
            ),
        ),
        (
            (0, 4, 0, 2),
            {"hosts": ["a"]},
            "the hosts (a: 2) have 2 processes together, but torchrun has started 4",
        ),
        (
            (0, 2, 0, 2),
            {"jobs": {"ps": 2}},
            "the jobs (chief: 1, ps: 2) have 3 tasks together, but torchrun has",
        ),
        (
            (0, 2, 0, 2),
            {"jobs": {"worker": -1, "ps": 2}},
            "jobs: 'worker' has -1 tasks, but a number of tasks is an int",
        ),
        (
            (0, 2, 0, 2),
            {"jobs": {"worker": 1.0}},
            "jobs: 'worker' has 1.0 tasks, but a number of tasks is an int",
        ),
        (
            (0, 2, 0, 2),
            {"jobs": {"chief": 2}},
            "rank 0 is the only chief, so `jobs` cannot be {'chief': 2}",
        ),
        (
            (0, 2, 0, 2),
            {"jobs": {"agent": 1}},
            "rank 0 is the only chief, so `jobs` cannot be {'agent': 1}",
        ),
    ],
)
def test_numbers_that_disagree_are_a_runtime_error(
    monkeypatch: pytest.MonkeyPatch,
    values: tuple[Any, ...],
    arguments: dict[str, Any],
    expected: str,
) -> None:
    started(monkeypatch, TORCHRUN, *values)
    with pytest.raises(RuntimeError) as caught:
        RankClusterResolver(**arguments)
    assert str(caught.value).startswith(expected)


def test_bad_host_list_names_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, TORCHRUN, 0, 4, 0, 2)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1")
    with pytest.raises(RuntimeError, match=r"SLURM_JOB_NODELIST: 'n\[1' is no host list"):
        RankClusterResolver()
