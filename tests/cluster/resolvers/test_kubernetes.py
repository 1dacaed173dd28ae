"""KubernetesClusterResolver: first the tests that TensorFlow has, by their names; then waiting,
addresses, and a real client.

The client is a double that knows pods by their label, but for the tests at the end: there the
package `kubernetes` asks an HTTP server.
"""

from __future__ import annotations

import json
import sys
import threading
import types
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cluster.resolvers.samples import is_cluster
from zmqdist import limits
from zmqdist.resolvers import ExecutableLocation, KubernetesClusterResolver
from zmqdist.testing import check_resolver

LABEL = "job-name=tensorflow"


def pod(name: str, host_ip: str | None = "10.1.2.3", phase: str = "Running", **status: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name, namespace="training"),
        status=SimpleNamespace(phase=phase, host_ip=host_ip, **status),
        spec=SimpleNamespace(hostname=name, subdomain="tasks"),
    )


class Client:
    """Pods by their label. `then` is what the next questions find."""

    def __init__(self, pods: dict[str, list[Any]], *then: dict[str, list[Any]]) -> None:
        self.states = [pods, *then]
        self.requests: list[tuple[str | None, str]] = []

    def list_pod_for_all_namespaces(self, label_selector: str, _request_timeout: float) -> Any:
        return self._found(None, label_selector)

    def list_namespaced_pod(
        self, namespace: str, label_selector: str, _request_timeout: float
    ) -> Any:
        return self._found(namespace, label_selector)

    def _found(self, namespace: str | None, selector: str) -> Any:
        self.requests.append((namespace, selector))
        pods = self.states[0] if len(self.states) == 1 else self.states.pop(0)
        return SimpleNamespace(items=pods[selector])


def resolver(*pods: Any, **argument: Any) -> KubernetesClusterResolver:
    return KubernetesClusterResolver(override_client=Client({LABEL: list(pods)}), **argument)


def test_single_item_successful_retrieval() -> None:
    matches = resolver(pod("tensorflow-abc123"), executable_location=ExecutableLocation.OFF_CLUSTER)
    assert is_cluster(matches.cluster_spec(), {"worker": ["10.1.2.3:8470"]})


def test_single_item_successful_retrieval_in_cluster() -> None:
    matches = resolver(
        pod("tensorflow-abc123"), executable_location=ExecutableLocation.WITHIN_CLUSTER
    )
    assert is_cluster(matches.cluster_spec(), {"worker": ["10.1.2.3:8470"]})


def test_value_error_raised_on_invalid_executable_location(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    with pytest.raises(ValueError, match="None is not a valid ExecutableLocation"):
        KubernetesClusterResolver(executable_location=None)  # type: ignore[arg-type]


def test_successful_retrieval_with_sort() -> None:
    matches = resolver(
        pod("tensorflow-abc123", "10.1.2.3"),
        pod("tensorflow-def456", "10.1.2.4"),
        pod("tensorflow-999999", "10.1.2.5"),
    )
    assert is_cluster(
        matches.cluster_spec(), {"worker": ["10.1.2.5:8470", "10.1.2.3:8470", "10.1.2.4:8470"]}
    )


def test_pods_keep_stateful_set_indices() -> None:
    matches = resolver(*(pod(f"train-worker-{index}", f"10.1.2.{index}") for index in (10, 2, 0)))
    assert is_cluster(
        matches.cluster_spec(), {"worker": [f"10.1.2.{index}:8470" for index in (0, 2, 10)]}
    )


def test_get_master_with_override_parameters() -> None:
    pods = [pod(f"tensorflow-{index}", f"10.1.2.{3 + index}") for index in range(3)]
    matches = resolver(*pods, rpc_layer="grpc")
    matches.task_type, matches.task_id = "worker", 0
    assert (matches.task_type, matches.task_id) == ("worker", 0)
    assert matches.master() == "grpc://10.1.2.3:8470"
    assert matches.master("worker", 2) == "grpc://10.1.2.5:8470"


def test_non_running_pod() -> None:
    with pytest.raises(
        RuntimeError, match=r'^Pod "tensorflow-abc123" is not running; phase: "Failed"$'
    ):
        resolver(pod("tensorflow-abc123", phase="Failed")).cluster_spec()


def test_multiple_pod_selectors_and_workers() -> None:
    client = Client(
        {
            "job-name=worker1": [pod("b", "10.1.2.4"), pod("c", "10.1.2.5"), pod("a", "10.1.2.3")],
            "job-name=worker2": [pod("b", "10.1.2.7"), pod("a", "10.1.2.6")],
            "job-name=ps-1": [pod("p", "10.1.2.8")],
        }
    )
    jobs = {"worker": ["job-name=worker1", "job-name=worker2"], "ps": ["job-name=ps-1"]}
    matches = KubernetesClusterResolver(jobs, override_client=client)
    workers = [f"10.1.2.{number}:8470" for number in (3, 4, 5, 6, 7)]
    assert is_cluster(matches.cluster_spec(), {"worker": workers, "ps": ["10.1.2.8:8470"]})


# -- the rest of the contract ----------------------------------------------------------------------


def test_missing_package_error_has_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="needs kubernetes: pip install kubernetes"):
        KubernetesClusterResolver()


@pytest.mark.parametrize(
    ("location", "loader"),
    [
        (ExecutableLocation.WITHIN_CLUSTER, "load_incluster_config"),
        (ExecutableLocation.OFF_CLUSTER, "load_kube_config"),
    ],
)
def test_location_decides_loader(
    location: ExecutableLocation, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow asks the loader for off the cluster again in cluster_spec, wherever it is."""
    loaded: list[str] = []
    package = types.ModuleType("kubernetes")
    config = {
        name: lambda name=name: loaded.append(name)
        for name in ("load_incluster_config", "load_kube_config")
    }
    package.config = SimpleNamespace(**config, ConfigException=KeyError)  # type: ignore[attr-defined]
    package.client = SimpleNamespace(CoreV1Api=lambda: Client({LABEL: [pod("a")]}))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    matches = KubernetesClusterResolver(executable_location=location)
    assert matches.cluster_spec() == matches.cluster_spec()
    assert loaded == [loader]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        (
            ExecutableLocation.WITHIN_CLUSTER,
            "this is not a pod with a service account; elsewhere pass executable_location=",
        ),
        (
            ExecutableLocation.OFF_CLUSTER,
            "there is no kubeconfig that can be used; in a pod pass ExecutableLocation.WITH",
        ),
    ],
)
def test_missing_api_server_has_remedy(
    location: ExecutableLocation, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotConfigured(Exception):
        pass

    def fails() -> None:
        raise NotConfigured("Service host/port is not set.")

    package = types.ModuleType("kubernetes")
    loaders = {"load_incluster_config": fails, "load_kube_config": fails}
    package.config = SimpleNamespace(**loaders, ConfigException=NotConfigured)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    with pytest.raises(RuntimeError) as caught:
        KubernetesClusterResolver(executable_location=location)
    start = "no Kubernetes API server is known (Service host/port is not set.): "
    assert str(caught.value).startswith(start + expected)


@pytest.mark.parametrize(
    ("status", "namespace", "expected"),
    [
        (
            403,
            None,
            (
                "list the pods of all namespaces: give the service account that right, or name a "
                "namespace"
            ),
        ),
        (
            401,
            "training",
            "list the pods of namespace training: give the service account that right",
        ),
        (500, None, None),
    ],
)
def test_refusing_api_server_names_right(
    status: int, namespace: str | None, expected: str | None
) -> None:
    class Refused(Exception):
        pass

    class Refusing(Client):
        def _found(self, namespace: str | None, selector: str) -> Any:
            error = Refused("(long)")
            error.status = status  # type: ignore[attr-defined]
            raise error

    matches = KubernetesClusterResolver(override_client=Refusing({}), namespace=namespace)
    with pytest.raises(Refused if expected is None else RuntimeError) as caught:
        matches.cluster_spec()
    assert expected is None or str(caught.value) == f"the API server does not let us {expected}"


def test_own_task_unknown_until_set() -> None:
    matches = resolver(pod("a"))
    assert (matches.task_type, matches.task_id, matches.master(), matches.master("worker")) == (
        None,
        None,
        "",
        "",
    )
    assert (matches.rpc_layer, matches.master("worker", 0)) == ("zmq", "zmq://10.1.2.3:8470")
    matches.rpc_layer = "grpc"
    assert matches.master("worker", 0) == "grpc://10.1.2.3:8470"


def test_pods_are_looked_for_in_one_namespace_or_in_all() -> None:
    client = Client({LABEL: [pod("a")]})
    KubernetesClusterResolver(override_client=client).cluster_spec()
    KubernetesClusterResolver(override_client=client, namespace="training").cluster_spec()
    assert client.requests == [(None, LABEL), ("training", LABEL)]


@pytest.mark.parametrize(
    ("kind", "address"),
    [
        ("host_ip", "10.1.2.3:8470"),
        ("pod_ip", "[fd00::1]:8470"),
        ("dns", "worker-0.tasks.training.svc:8470"),
    ],
)
def test_address_of_node_pod_or_name(kind: Any, address: str) -> None:
    matches = resolver(pod("worker-0", pod_ip="fd00::1"), address_type=kind)
    assert matches.cluster_spec().job_tasks("worker") == [address]


def test_pod_without_dns_name_is_reported() -> None:
    nameless = pod("worker-0")
    nameless.spec.subdomain = None
    with pytest.raises(
        RuntimeError, match='Pod "worker-0" has no name in DNS: only pods of a StatefulSet'
    ):
        resolver(nameless, address_type="dns").cluster_spec()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"address_type": "ip"}, 'address_type must be "host_ip", "pod_ip" or "dns", not .ip'),
        ({"num_tasks": {"ps": 1}}, "num_tasks names jobs that have no label selectors: ps"),
    ],
)
def test_wrong_arguments_are_a_value_error(argument: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        resolver(**argument)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "POD_POLL_S", 0.001)


@pytest.mark.usefixtures("hurried")
def test_resolver_waits_for_starting_pods() -> None:
    states = [
        [],
        [pod("a", phase="Pending")],
        [pod("a", None)],
        [pod("a")],
        [pod("a"), pod("b", "10.1.2.4")],
    ]
    client = Client(*({LABEL: pods} for pods in states))
    matches = KubernetesClusterResolver(override_client=client, wait_s=50, num_tasks={"worker": 2})
    assert matches.cluster_spec().job_tasks("worker") == ["10.1.2.3:8470", "10.1.2.4:8470"]
    assert len(client.requests) == len(states)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("pods", "wait", "expected"),
    [
        ([pod("a", phase="Pending")], 0, 'Pod "a" is not running; phase: "Pending"'),
        (
            [pod("a", phase="Pending")],
            0.01,
            'Pod "a" is not running; phase: "Pending" (waited 0.01 s)',
        ),
        ([pod("a", None)], 0, 'Pod "a" has no host_ip yet'),
        ([pod("a", phase="Succeeded")], 50, 'Pod "a" is not running; phase: "Succeeded"'),
        ([], 0.01, f"job 'worker' has 0 pods with the label {LABEL}, expected 1 (waited 0.01 s)"),
    ],
)
def test_vain_wait_error_names_pods(pods: list[Any], wait: float, expected: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        resolver(*pods, wait_s=wait).cluster_spec()
    assert str(caught.value) == expected


def test_number_of_tasks_checked_without_wait() -> None:
    with pytest.raises(RuntimeError, match=r"has 2 pods with the label .*, expected 1"):
        resolver(pod("a"), pod("b"), num_tasks={"worker": 1}).cluster_spec()
    assert resolver().cluster_spec().as_dict() == {"worker": {}}, (
        "nobody said how many there should be"
    )


def test_resolver_conforms() -> None:
    check_resolver(resolver(pod("a"), pod("b", "10.1.2.4")))


# -- the package itself, over HTTP -----------------------------------------------------------------


@pytest.fixture
def api_server() -> Iterator[Callable[..., str]]:
    """An API server with these pods by label; gives its URL. Another path or label is refused, as
    one without rights would be."""
    servers: list[ThreadingHTTPServer] = []

    def serve(path: str, pods: dict[str, list[dict[str, Any]]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests = urllib.parse.urlsplit(self.path)
                label = urllib.parse.parse_qs(requests.query).get("labelSelector", [""])[0]
                matches = pods.get(label) if requests.path == path else None
                body = json.dumps(
                    {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": matches or []}
                ).encode()
                self.send_response(403 if matches is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def running(name: str, pod_ip: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "training"},
        "spec": {"containers": [{"name": "main"}], "hostname": name, "subdomain": "tasks"},
        "status": {"phase": "Running", "hostIP": "10.0.0.9", "podIP": pod_ip},
    }


@pytest.mark.parametrize(
    ("path", "namespace"),
    [("/api/v1/pods", None), ("/api/v1/namespaces/training/pods", "training")],
)
def test_package_reads_api_server(
    api_server: Callable[..., str], path: str, namespace: str | None
) -> None:
    kubernetes = pytest.importorskip("kubernetes")
    url = api_server(path, {"job-name=w": [running("w-1", "10.1.0.2"), running("w-0", "10.1.0.1")]})
    with kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url)) as connection:
        matches = KubernetesClusterResolver(
            {"worker": ["job-name=w"]},
            override_client=kubernetes.client.CoreV1Api(connection),
            address_type="pod_ip",
            namespace=namespace,
            num_tasks={"worker": 2},
        )
        assert matches.cluster_spec().job_tasks("worker") == ["10.1.0.1:8470", "10.1.0.2:8470"]
        check_resolver(matches)
        with pytest.raises(RuntimeError, match="does not let us list the pods"):
            KubernetesClusterResolver(
                override_client=kubernetes.client.CoreV1Api(connection), namespace="another"
            ).cluster_spec()
