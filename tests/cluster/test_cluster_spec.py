"""ClusterSpec and the definitions: first the tests that TensorFlow has, by their names, then what
the contract adds."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import yaml

from zmqdist.cluster import ClusterDef, ClusterDeviceFilters, ClusterSpec, JobDef, ServerDef
from zmqdist.errors import InvalidArgumentError

# -- TensorFlow's ServerDefTest and ClusterSpecTest ------------------------------------------------


def test_local_server() -> None:
    cluster = ClusterSpec({"local": ["localhost:2222"]}).as_cluster_def()
    server = ServerDef(cluster=cluster, job_name="local", task_index=0, protocol="zmq")
    assert server == ServerDef(
        ClusterDef([JobDef("local", {0: "localhost:2222"})]), "local", 0, protocol="zmq"
    )
    assert ClusterSpec(cluster).as_cluster_def() == cluster


def test_two_processes() -> None:
    cluster = ClusterSpec({"local": ["localhost:2222", "localhost:2223"]}).as_cluster_def()
    server = ServerDef(cluster=cluster, job_name="local", task_index=1, protocol="zmq")
    assert server.cluster.job == [JobDef("local", {0: "localhost:2222", 1: "localhost:2223"})]
    assert (server.job_name, server.task_index, server.protocol) == ("local", 1, "zmq")
    assert ClusterSpec(cluster).as_cluster_def() == cluster


def test_two_jobs() -> None:
    jobs = {
        "ps": ["ps0:2222", "ps1:2222"],
        "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
    }
    cluster = ClusterSpec(jobs).as_cluster_def()
    server = ServerDef(cluster=cluster, job_name="worker", task_index=2, protocol="zmq")
    assert [job.name for job in server.cluster.job] == ["ps", "worker"]
    assert server.cluster.job[1].tasks == {0: "worker0:2222", 1: "worker1:2222", 2: "worker2:2222"}
    assert server.own_address() == "worker2:2222"
    assert ClusterSpec(cluster).as_cluster_def() == cluster


def test_dense_and_sparse_jobs() -> None:
    spec = ClusterSpec(
        {"ps": ["ps0:2222", "ps1:2222"], "worker": {0: "worker0:2222", 2: "worker2:2222"}}
    )
    cluster = spec.as_cluster_def()
    assert cluster.job == [
        JobDef("ps", {0: "ps0:2222", 1: "ps1:2222"}),
        JobDef("worker", {0: "worker0:2222", 2: "worker2:2222"}),
    ]
    assert ClusterSpec(cluster).as_cluster_def() == cluster


def test_string_conversion() -> None:
    spec = ClusterSpec(
        {
            "worker": ["worker0:3333", "worker1:4444"],
            "ps": ["ps0:1111"],
            "sparse": {1: "s1:1", 0: "s0:1"},
        }
    )
    expected = "ClusterSpec({'ps': ['ps0:1111'], 'sparse': ['s0:1', 's1:1'], 'worker': ['worker0:3333', 'worker1:4444']})"
    assert (str(spec), repr(spec)) == (expected, expected)


def four_ways_are_one(jobs: dict[str, Any]) -> bool:
    """Whether a dict, its spec, the spec's def and the spec's dict are the same cluster."""
    spec = ClusterSpec(jobs)
    cluster = spec.as_cluster_def()
    ways = [ClusterSpec(source) for source in (jobs, spec, cluster, spec.as_dict())]
    return all(way == spec and way.as_cluster_def() == cluster for way in ways)


def test_proto_dict_def_equivalences() -> None:
    assert four_ways_are_one(
        {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222"]}
    )


def test_proto_dict_def_equivalences_with_zero_worker() -> None:
    assert four_ways_are_one({"ps": ["ps0:2222", "ps1:2222"], "worker": []})


def test_cluster_spec_accessors() -> None:
    jobs: dict[str, Any] = {
        "ps": ["ps0:2222", "ps1:2222"],
        "worker": ["worker0:2222", "worker1:2222", "worker2:2222"],
        "sparse": {0: "sparse0:2222", 3: "sparse3:2222"},
    }
    spec = ClusterSpec(jobs)
    assert spec.as_dict() == jobs
    assert [spec.num_tasks(job) for job in jobs] == [2, 3, 2]
    assert [spec.task_indices(job) for job in jobs] == [[0, 1], [0, 1, 2], [0, 3]]
    assert spec.task_address("ps", 1) == "ps1:2222"
    assert spec.task_address("sparse", 3) == "sparse3:2222"
    assert spec.job_tasks("worker") == jobs["worker"]
    assert spec.job_tasks("sparse") == ["sparse0:2222", None, None, "sparse3:2222"]
    for ask in (
        spec.num_tasks,
        spec.task_indices,
        spec.job_tasks,
        lambda job: spec.task_address(job, 0),
    ):
        with pytest.raises(ValueError, match="no job 'unknown'"):
            ask("unknown")
    with pytest.raises(ValueError, match="job 'sparse' has no task with index 2"):
        spec.task_address("sparse", 2)


def test_empty_cluster_spec_is_false() -> None:
    assert not ClusterSpec({})


def test_non_empty_cluster_spec_is_true() -> None:
    assert ClusterSpec({"worker": ["worker0:2222"]})
    assert ClusterSpec({"worker": []})


def test_eq() -> None:
    assert ClusterSpec({}) == ClusterSpec({})
    dense = ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]})
    assert dense == ClusterSpec({"worker": {1: "c:1", 0: "b:1"}, "ps": {0: "a:1"}})
    assert ClusterSpec({"a": ["x"]}) == {"a": {0: "x"}}


@pytest.mark.parametrize(
    "second", [{"job": ["b:1", "a:1"]}, {"job": ["a:1", "c:1"]}, {"other": ["a:1", "b:1"]}, {}]
)
def test_ne(second: dict[str, list[str]]) -> None:
    assert ClusterSpec({"job": ["a:1", "b:1"]}) != ClusterSpec(second)


# -- the rest of the contract ----------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [["a:1"], None, "a:1", 3], ids=repr)
def test_cluster_of_wrong_type_is_refused(cluster: Any) -> None:
    with pytest.raises(TypeError, match="a cluster is a dict of jobs"):
        ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"worker": "a:1"}, "the tasks of job 'worker' must be a list or a dict, not 'a:1'"),
        ({"worker": None}, "the tasks of job 'worker' must be a list or a dict, not None"),
        ({"worker": [None]}, "address of task 0 of job 'worker' must be a string, not None"),
        ({"worker": {3: 2222}}, "address of task 3 of job 'worker' must be a string, not 2222"),
        ({"worker": {None: "a:1"}}, "task index None of job 'worker' is not a number"),
        ({7: ["a:1"]}, "job name must be a string, not 7"),
    ],
)
def test_type_error_names_job(cluster: Any, expected: str) -> None:
    with pytest.raises(TypeError) as caught:
        ClusterSpec(cluster)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"w": {"x": "a:1"}}, "task index 'x' of job 'w' is not a number"),
        ({"w": {float("inf"): "a:1"}}, "task index inf of job 'w' is not a number"),
        ({"w": {2**31: "a:1"}}, "task index 2147483648 of job 'w' is not between 0 and 2147483647"),
        ({"w": {-1: "a:1"}}, "task index -1 of job 'w' is not between 0 and 2147483647"),
        ({"w": {"1": "a:1", 1: "b:1"}}, "job 'w' has the task index 1 twice"),
        ({"w": ["a:1"], b"w": ["b:1"]}, "job 'w' is listed twice"),
        (ClusterDef([JobDef("w"), JobDef("w")]), "job 'w' is listed twice"),
        (
            ClusterDef([JobDef("w", {-2: "a:1"})]),
            "task index -2 of job 'w' is not between 0 and 2147483647",
        ),
    ],
)
def test_bad_index_or_duplicate_job_is_refused(cluster: Any, expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        ClusterSpec(cluster)
    assert str(caught.value) == expected


def test_indices_go_through_int_and_texts_may_be_bytes() -> None:
    spec = ClusterSpec({b"worker": {"1": b"a:1", 2.7: "b:1"}, "ps": ("c:1",)})
    assert spec.as_dict() == {"worker": {1: "a:1", 2: "b:1"}, "ps": ["c:1"]}


@pytest.mark.parametrize("index", ["0", 0.0, None, []], ids=repr)
def test_task_address_needs_int_index(index: Any) -> None:
    with pytest.raises(ValueError, match="has no task with index"):
        ClusterSpec({"worker": ["a:1"]}).task_address("worker", index)


def test_argument_copied_and_def_cached() -> None:
    addresses = ["a:1"]
    jobs = {"worker": addresses}
    spec = ClusterSpec(jobs)
    addresses.append("b:1")
    jobs["ps"] = ["c:1"]
    as_list = spec.as_dict()["worker"]
    assert isinstance(as_list, list)
    as_list.append("d:1")
    assert spec.as_dict() == {"worker": ["a:1"]}
    assert spec.as_cluster_def() is spec.as_cluster_def()


def test_jobs_ordered_by_dict_or_name() -> None:
    spec = ClusterSpec({"worker": [], "ps": [], "chief": []})
    assert spec.jobs == ["worker", "ps", "chief"]
    assert (
        ClusterSpec(spec).jobs
        == ClusterSpec(spec.as_cluster_def()).jobs
        == ["chief", "ps", "worker"]
    )
    unsorted = ClusterDef([JobDef("b", {1: "x:1", 0: "y:1"}), JobDef("a")])
    assert list(ClusterSpec(unsorted).as_cluster_def().job[1].tasks) == [0, 1]
    assert ClusterSpec(unsorted).jobs == ["a", "b"]


def test_empty_job_has_no_tasks() -> None:
    spec = ClusterSpec({"worker": []})
    assert (spec.job_tasks("worker"), spec.num_tasks("worker"), spec.as_dict()) == (
        [],
        0,
        {"worker": {}},
    )
    assert spec.as_cluster_def() == ClusterDef([JobDef("worker")])


def test_spec_survives_pickle_and_deepcopy() -> None:
    spec = ClusterSpec({"worker": {0: "a:1", 5: "b:1"}})
    with pytest.raises(TypeError, match="unhashable"):
        hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec


def test_validate_lists_every_bad_or_repeated_address() -> None:
    spec = ClusterSpec(
        {
            "worker": [
                "host",
                "a:1",
                "::1:5",
                "[::1]:5",
                "[::1:5",
                "a:70000",
                "a:x",
                "tcp://a:1",
                "a b:1",
                "[x]:1",
                "a:",
            ],
            "ps": {0: "a:1", 4: "b:0", 5: "b:0", 6: ":2222"},
        }
    )
    assert spec.validate() == [
        "worker:0 has the address 'host': no port; write host:port",
        "worker:1 has the address 'a:1', which ps:0 has already",
        "worker:2 has the address '::1:5': an IPv6 host needs brackets, like [::1]:5050",
        "worker:4 has the address '[::1:5': the bracket is not closed",
        "worker:5 has the address 'a:70000': port 70000 is above 65535",
        "worker:6 has the address 'a:x': 'x' is not a port number",
        "worker:7 has the address 'tcp://a:1': write host:port without tcp://",
        "worker:8 has the address 'a b:1': 'a b' is not a host name",
        "worker:9 has the address '[x]:1': 'x' is not an IPv6 address",
        "worker:10 has the address 'a:': no port after the colon",
    ]
    assert ClusterSpec({"worker": ["a:1", "[::1]:1", "127.0.0.1:1"]}).validate() == []


# -- definitions -----------------------------------------------------------------------------------

SERVER = ServerDef(
    ClusterDef([JobDef("ps", {10: "p:1", 2: "q:1"}), JobDef("worker", {0: "w:1"})]),
    "worker",
    0,
    {"value": 0.1, "nested": {"list": [1, None]}},
    "zmq",
    7,
    ClusterDeviceFilters({"worker": {0: ["/job:ps"]}}),
    3,
)


def test_server_def_survives_dict_and_bytes() -> None:
    parsed = ServerDef(job_name="other")
    data = SERVER.SerializeToString()
    assert parsed.ParseFromString(data) == len(data)
    assert (
        parsed
        == ServerDef.from_dict(SERVER.to_dict())
        == SERVER.copy()
        == copy.copy(SERVER)
        == SERVER
    )
    twin = SERVER.copy()
    twin.cluster.job[0].tasks[3] = "new:1"
    assert twin != SERVER


def test_server_def_survives_yaml() -> None:
    assert ServerDef.from_dict(yaml.safe_load(yaml.safe_dump(SERVER.to_dict()))) == SERVER


def test_equal_content_gives_equal_bytes() -> None:
    first, second = JobDef("w", {1: "a:1", 10: "b:1"}), JobDef("w", {10: "b:1", 1: "a:1"})
    assert first == second
    assert (
        first.SerializeToString()
        == second.SerializeToString()
        == b'{"name":"w","tasks":{"1":"a:1","10":"b:1"}}'
    )


def test_from_dict_copies_its_source() -> None:
    source = SERVER.to_dict()
    parsed = ServerDef.from_dict(source)
    source["default_session_config"]["nested"]["list"].append("later")
    assert parsed == SERVER


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"job_name":1}',
        b'{"cluster":{"job":[{"nmae":"w"}]}}',
        b'{"x":1}',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "binary", "list", "type", "inner key", "outer key", "deep"],
)
def test_bad_bytes_change_no_server_def(data: bytes) -> None:
    server = SERVER.copy()
    with pytest.raises(ValueError, match="not a ServerDef"):
        server.ParseFromString(data)
    assert server == SERVER


@pytest.mark.parametrize(
    ("address", "port", "own"),
    [
        ("host:1", 0, "host:1"),
        ("host:1", 9, "host:9"),
        ("host", 9, "host:9"),
        ("[::1]:1", 9, "[::1]:9"),
        ("[::1]", 9, "[::1]:9"),
        (":1", 9, ":9"),
        ("host", 0, "host"),
    ],
)
def test_server_def_port_overrides_address(address: str, port: int, own: str) -> None:
    server = ServerDef(ClusterDef([JobDef("w", {4: address})]), "w", 4, port=port)
    assert server.own_address() == own


@pytest.mark.parametrize(("job", "index"), [("w", 1), ("v", 0)])
def test_unknown_task_has_no_own_address(job: str, index: int) -> None:
    server = ServerDef(ClusterDef([JobDef("w", {0: "a:1"})]), job, index)
    with pytest.raises(
        InvalidArgumentError, match=f"task {index} of job '{job}' was not defined in cluster"
    ):
        server.own_address()


def test_filtered_task_sees_matches_and_itself() -> None:
    filters = ClusterDeviceFilters()
    filters.set_device_filters("worker", 0, ["/job:ps/task:1", "/job:chief"])
    filters.set_device_filters("worker", 2, [])
    visible = [
        filters.is_visible("worker", 0, device)
        for device in (
            "/job:worker/task:0",
            "/job:worker/task:1",
            "/job:ps/task:0",
            "/job:ps/replica:0/task:1/device:CPU:0",
            "/job:chief/task:0",
        )
    ]
    assert visible == [True, False, False, True, True]
    assert filters.is_visible("worker", 1, "/job:worker/task:0"), "no filters were set for it"
    assert filters.is_visible("worker", 2, "/job:worker/task:0"), (
        "an empty list of filters hides nothing"
    )


def test_device_filters_must_be_strings_of_the_right_form() -> None:
    filters = ClusterDeviceFilters()
    with pytest.raises(AssertionError, match="must be strings"):
        filters.set_device_filters("worker", 0, ["/job:ps", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'ps' is not of the form"):
        filters.set_device_filters("worker", 0, ["ps"])
    with pytest.raises(ValueError, match="is not of the form"):
        filters.is_visible("worker", 0, "/job")
    assert filters == ClusterDeviceFilters()
