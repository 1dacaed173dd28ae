"""The manifests of a cluster file: their content, the files that cannot be rendered, and a cluster
of their pods that runs the program."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml

from tests.cli.helpers import run_here
from tests.launch.helpers import Pods, documents, named
from zmqdist.cluster import ClusterConfig
from zmqdist.errors import ConfigError
from zmqdist.launch.kubernetes import render, secret_command
from zmqdist.transport.keys import keygen

TOP = "name: train\nprogram: python app/train.py --epochs 3\n"
JOBS = "jobs: {worker: {count: 2}, ps: {count: 2}}\n"
IMAGE = "kubernetes: {image: 'registry/train:1'}\n"
FULL = """
name: train
launcher: kubernetes
jobs:
  dispatcher: {work_dir: /data, fault_tolerant_mode: true}
  worker: {count: 3, slots: auto, env: {OMP_NUM_THREADS: "1", PRICE: "5$ $(POD_INDEX)"}}
  ps: {count: 2, env: {PASSWORD: secret}}
  chief: {env: {PASSWORD: secret}}
  evaluator: {program: "python app/evaluate.py $HOME"}
program: python app/train.py
security: {keys: "my keys"}
kubernetes:
  image: registry/train:1
  image_pull_policy: Always
  namespace: training
  service_account: trainer
  user_id: 4711
  storage: 5Gi
  resources:
    worker: {cpu: 2.5, memory: 4Gi, gpus: 1}
    ps: {cpu: 1, memory: 512Mi}
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], ClusterConfig]:
    def load(text: str) -> ClusterConfig:
        (tmp_path / "cluster.yaml").write_text(text)
        return ClusterConfig.load(tmp_path / "cluster.yaml", "kubernetes")

    return load


Load = Callable[[str], ClusterConfig]


def pods(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the specs of the pods, by component."""
    matches = {}
    for entry in objects.values():
        if entry["kind"] in ("StatefulSet", "Job"):
            component = entry["metadata"]["labels"]["app.kubernetes.io/component"]
            matches[component] = entry["spec"]["template"]["spec"]
    return matches


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in pod["containers"][0].get("env", ())}


def mounted(pod: dict[str, Any]) -> set[str]:
    """Return the key files that a pod mounts."""
    secrets = [volume["secret"] for volume in pod.get("volumes", ()) if "secret" in volume]
    return {item["path"] for secret in secrets for item in secret["items"]}


# -- what they say ---------------------------------------------------------------------------------


def test_file_gives_one_object_per_job(config: Load) -> None:
    text = render(config(FULL))
    assert list(named(text)) == [
        "ConfigMap/train-config",
        "Service/train-dispatcher",
        "StatefulSet/train-dispatcher",
        "Service/train-ps",
        "StatefulSet/train-ps",
        "Service/train-worker",
        "StatefulSet/train-worker",
        "Job/train-evaluator",
        "Job/train-program",
    ]
    assert {entry["metadata"]["namespace"] for entry in documents(text)} == {"training"}


def test_manifests_are_deterministic(config: Load) -> None:
    assert render(config(FULL), ["--fast"], 5.0) == render(config(FULL), ["--fast"], 5.0)


def test_pod_file_has_service_addresses(config: Load) -> None:
    objects = named(render(config(FULL)))
    (text,) = objects["ConfigMap/train-config"]["data"].values()
    raw = yaml.safe_load(text)
    runtime = raw.pop("runtime")
    assert runtime == {
        "dispatcher": "zmq://train-dispatcher.training.svc:5050",
        "keys_dir": "/etc/zmqdist/keys",
    }
    assert raw["security"] == {"curve": True, "keys": "/etc/zmqdist/keys"}
    loaded = ClusterConfig.from_dict(raw)
    assert loaded.spec.as_dict() == {
        "dispatcher": ["train-dispatcher.training.svc:5050"],
        "ps": [f"train-ps-{index}.train-ps.training.svc:5052" for index in range(2)],
        "worker": [f"train-worker-{index}.train-worker.training.svc:5051" for index in range(3)],
    }
    assert objects["StatefulSet/train-worker"]["spec"]["replicas"] == 3
    for job in ("worker", "ps"):  # the names that these addresses need
        spec = objects[f"Service/train-{job}"]["spec"]
        assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
        assert objects[f"StatefulSet/train-{job}"]["spec"]["serviceName"] == f"train-{job}"
    assert "clusterIP" not in objects["Service/train-dispatcher"]["spec"]


def test_service_selects_pods_of_its_job(config: Load) -> None:
    objects = named(render(config(FULL)))
    templates = [
        entry["spec"]["template"]
        for entry in objects.values()
        if "template" in entry.get("spec", {})
    ]
    for job in ("dispatcher", "worker", "ps"):
        selector = objects[f"Service/train-{job}"]["spec"]["selector"].items()
        matched = [entry for entry in templates if selector <= entry["metadata"]["labels"].items()]
        assert matched == [objects[f"StatefulSet/train-{job}"]["spec"]["template"]]
        (port,) = matched[0]["spec"]["containers"][0]["ports"]
        assert port["name"] == objects[f"Service/train-{job}"]["spec"]["ports"][0]["targetPort"]


def test_pod_mounts_keys_of_its_role_only(config: Load) -> None:
    matches = {name: mounted(pod) for name, pod in pods(named(render(config(FULL)))).items()}
    assert matches == {
        "dispatcher": {"server.key", "authorized", "server.pub", "client.key"},
        "ps": {"server.key", "worker.key", "authorized", "server.pub", "client.key"},
        "worker": {"worker.key", "authorized", "server.pub"},
        "program": {"submit.key", "authorized", "server.pub"},
        "evaluator": set(),
    }


def test_secret_command_has_all_mounted_files(config: Load, tmp_path: Path) -> None:
    loaded = config(FULL)
    text, command = render(loaded), secret_command(loaded)
    secrets = [
        entry
        for pod in pods(named(text)).values()
        for entry in pod.get("volumes", ())
        if "secret" in entry
    ]
    assert {entry["secret"]["secretName"] for entry in secrets} == {"train-keys"}
    assert command in text
    start = "kubectl create secret generic train-keys --namespace training "
    assert command.startswith(f"{start}--from-file='my keys/server.key' ")
    assert "admin.key" not in command
    needed = set().union(*map(mounted, pods(named(text)).values()))
    assert all(f"/{name}" in command for name in needed)
    assert secret_command(config(TOP + JOBS + IMAGE)).startswith(
        "zmqdist keygen keys && kubectl create secret "
    )


def test_pod_has_resources_and_slots(config: Load) -> None:
    text = render(config(FULL))
    matches = pods(named(text))
    assert matches["worker"]["containers"][0]["resources"] == {
        "requests": {"cpu": "2500m", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "1"},
    }
    assert matches["ps"]["containers"][0]["resources"]["requests"] == {
        "cpu": "1",
        "memory": "512Mi",
    }
    assert "resources" not in matches["program"]["containers"][0]
    assert "slots: 3" in text


@pytest.mark.parametrize(
    ("keys", "cpu", "threads"),
    [
        ("slots: 2", "8", 4),
        ("slots: 4", "2.5", 1),
        ("slots: auto", "2.5", 1),
        ("slots: 2, threads_per_slot: 3", "8", 3),
        ("slots: 2, env: {OMP_NUM_THREADS: '1'}", "8", None),
        ("slots: 2", "null", None),
    ],
)
def test_pod_slots_share_cores(config: Load, keys: str, cpu: str, threads: int | None) -> None:
    image = f"kubernetes: {{image: x, resources: {{worker: {{cpu: {cpu}}}}}}}\n"
    text = render(config(f"{TOP}jobs: {{worker: {{count: 1, {keys}}}}}\n{image}"))
    file = yaml.safe_load(named(text)["ConfigMap/train-config"]["data"]["cluster.yaml"])
    assert file["jobs"]["worker"].get("threads_per_slot") == threads


def test_pods_take_ports_from_range(config: Load) -> None:
    matches = pods(named(render(config(FULL + "ports: 6000-6100\n"))))
    assert {
        name for name, pod in matches.items() if variables(pod).get("ZMQDIST_PORTS") == "6000-6100"
    } == set(matches) - {"evaluator"}


def test_pods_have_no_privileges_nor_token(config: Load) -> None:
    for pod in pods(named(render(config(TOP + JOBS + IMAGE)))).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for pod in pods(named(render(config(FULL)))).values():
        assert (pod["automountServiceAccountToken"], pod["serviceAccountName"]) == (True, "trainer")
        assert pod["securityContext"]["runAsUser"] == 4711


def test_job_variables_in_own_pods_keep_dollars(config: Load) -> None:
    text = render(config(FULL))
    matches = pods(named(text))
    assert variables(matches["worker"])["PRICE"] == "5$$ $$(POD_INDEX)"
    assert {name for name, pod in matches.items() if "PASSWORD" in variables(pod)} == {
        "ps",
        "program",
    }
    assert "secret" not in named(text)["ConfigMap/train-config"]["data"]["cluster.yaml"]
    assert matches["evaluator"]["containers"][0]["command"] == [
        "python",
        "app/evaluate.py",
        "$$HOME",
    ]


def test_task_index_is_pod_index(config: Load) -> None:
    matches = pods(named(render(config(FULL))))
    for job, task, index in (
        ("worker", "worker", "7"),
        ("ps", "ps", "7"),
        ("program", "chief", "0"),
    ):
        environment = matches[job]["containers"][0]["env"]
        if job != "program":  # Kubernetes fills it into the variables that come after it
            assert environment[0]["name"] == "POD_INDEX"
        tf_config = json.loads(variables(matches[job])["TF_CONFIG"].replace("$(POD_INDEX)", "7"))
        assert tf_config["task"] == {"type": task, "index": int(index)}
        assert len(tf_config["cluster"]["worker"]) == 3


def test_evaluator_has_no_dispatcher(config: Load) -> None:
    evaluator = variables(pods(named(render(config(FULL))))["evaluator"])
    assert "ZMQDIST_CONFIG" not in evaluator
    assert json.loads(evaluator["TF_CONFIG"])["task"] == {"type": "evaluator", "index": 0}


def test_pod_grace_exceeds_role_grace(config: Load) -> None:
    matches = pods(named(render(config(TOP + JOBS + IMAGE), grace_s=30.0)))
    assert {pod["terminationGracePeriodSeconds"] for pod in matches.values()} == {35}
    assert matches["worker"]["containers"][0]["command"][-2:] == ["--grace", "30"]
    assert matches["program"]["restartPolicy"] == "Never"


def test_work_dir_is_on_a_lasting_volume(config: Load) -> None:
    objects = named(render(config(FULL)))
    spec = objects["StatefulSet/train-dispatcher"]["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    mount = spec["template"]["spec"]["containers"][0]["volumeMounts"][-1]
    assert mount["name"] == claim["metadata"]["name"]
    assert (
        f"work_dir: {mount['mountPath']}/work\n"
        in objects["ConfigMap/train-config"]["data"]["cluster.yaml"]
    )
    assert (
        "volumeClaimTemplates"
        not in named(render(config(TOP + JOBS + IMAGE)))["StatefulSet/train-dispatcher"]["spec"]
    )


def test_arguments_are_added_to_the_program(config: Load) -> None:
    program = pods(named(render(config(TOP + JOBS + IMAGE), ["--rate", "0.1"])))["program"][
        "containers"
    ][0]
    assert program["command"] == ["python", "app/train.py", "--epochs", "3", "--rate", "0.1"]


# -- what Kubernetes takes -------------------------------------------------------------------------

KINDS = {
    "ConfigMap": kubernetes.client.V1ConfigMap,
    "Service": kubernetes.client.V1Service,
    "StatefulSet": kubernetes.client.V1StatefulSet,
    "Job": kubernetes.client.V1Job,
}
PLAIN = {"str": str, "int": int, "bool": bool, "object": object}


def mistakes(value: Any, kind: str, location: str) -> Iterator[str]:
    """Yield the parts of an object that do not fit the models of Kubernetes' own client: unknown
    keys, and values of another type."""
    container = re.fullmatch(
        r"(?i)(list|dict)[\[(](?:str, *)?(.*)[\])]", kind
    )  # list[X], List[X]; dict(str, X), Dict[str, X]
    if container is not None and container[1].lower() == "list":
        for index, entry in enumerate(value):
            yield from mistakes(entry, container[2], f"{location}[{index}]")
    elif container is not None:
        for key, entry in value.items():
            yield from mistakes(entry, container[2], f"{location}.{key}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{location}: {value!r} is no {kind}"
    else:
        model = getattr(kubernetes.client, kind)
        keys = {key: name for name, key in model.attribute_map.items()}
        for key, entry in value.items():
            if key not in keys:
                yield f"{location}.{key}: there is no such key"
            else:
                yield from mistakes(entry, model.openapi_types[keys[key]], f"{location}.{key}")


@pytest.mark.parametrize("text", [FULL, TOP + JOBS + IMAGE])
def test_manifest_keys_fit_kubernetes_schema(config: Load, text: str) -> None:
    for entry in documents(render(config(text))):
        assert list(mistakes(entry, KINDS[entry["kind"]].__name__, entry["kind"])) == []
    wrong = {
        "kind": "Service",
        "spec": {"selektor": {}, "ports": [{"port": "5050"}], "clusterIP": "None"},
    }
    assert list(mistakes(wrong, "V1Service", "Service")) == [
        "Service.spec.selektor: there is no such key",
        "Service.spec.ports[0].port: '5050' is no int",
    ]


# -- what cannot be rendered -----------------------------------------------------------------------

REFUSED = {
    "no image": (
        TOP + JOBS,
        (
            "c.yaml:1: kubernetes.image: required key is missing (an image with zmqdist and the "
            "program in it)"
        ),
    ),
    "a name with capitals": (
        TOP.replace("train", "Train", 1) + JOBS + IMAGE,
        (
            "c.yaml:1: name: 'Train' cannot begin the names of objects in Kubernetes (at most 40 "
            "small letters, digits and '-', a "
            "letter first)"
        ),
    ),
    "no keys": (
        TOP + JOBS + IMAGE + "security: {curve: false}\n",
        (
            "c.yaml:5: security.curve: launcher: kubernetes connects hosts, which needs keys (write "
            "curve: auto)"
        ),
    ),
    "addresses of tasks": (
        TOP + "jobs: {worker: {tasks: ['a:1', 'b:1']}}\n" + IMAGE,
        (
            "c.yaml:3: jobs.worker.tasks: launcher: kubernetes finds the addresses itself (write "
            "count instead)"
        ),
    ),
    "a host for the dispatcher": (
        TOP + "jobs: {dispatcher: {address: 'head:5050'}, worker: {count: 1}}\n" + IMAGE,
        (
            "c.yaml:3: jobs.dispatcher.address: names the host 'head', which Kubernetes chooses "
            "(leave the address out)"
        ),
    ),
    "slots of unknown cores": (
        TOP + "jobs: {worker: {count: 1, slots: auto}}\n" + IMAGE,
        (
            "c.yaml:3: jobs.worker.slots: is auto, but the file does not say how many cores a "
            "worker's pod has (write "
            "kubernetes.resources.worker.cpu, or a number of slots)"
        ),
    ),
    "a size without a unit": (
        TOP + JOBS + IMAGE.replace("'}", "', resources: {ps: {memory: '4'}}}"),
        (
            "c.yaml:4: kubernetes.resources.ps.memory: expected a size such as 512Mi or 4Gi, or null, "
            "got '4'"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_key_without_meaning_in_pod_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, problem = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.load("c.yaml", "kubernetes")
    assert str(caught.value) == problem


def test_command_prints_manifests_and_secret(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(TOP + JOBS + IMAGE)
    result = run_here(
        "launch", "c.yaml", "--on", "kubernetes", "--render", "--", "--rate", "1", cwd=tmp_path
    )
    assert (result.code, len(documents(result.out))) == (0, 8), result.err
    assert result.err.startswith(
        "make the Secret of the keys once: zmqdist keygen keys && kubectl create secret generic "
        "train-keys "
    )


def test_command_names_missing_option(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(TOP + JOBS + IMAGE)
    (tmp_path / "none.yaml").write_text(TOP + JOBS)
    for arguments, problem in (
        (
            ("c.yaml", "--on", "kubernetes"),
            "manifests are written with --render and applied with kubectl: zmqdist launch FILE",
        ),
        (
            ("c.yaml", "--render"),
            "--render is for Kubernetes, and the launcher is local: add --on kubernetes",
        ),
        (
            ("none.yaml", "--on", "kubernetes", "--render"),
            "none.yaml:1: kubernetes.image: required key is missing",
        ),
    ):
        result = run_here("launch", *arguments, cwd=tmp_path)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"zmqdist launch: {problem}")


def test_validate_checks_kubernetes_keys_only(
    tmp_path: Path,
) -> None:
    file = TOP.replace("python", "program-of-the-image") + JOBS + "launcher: kubernetes\n"
    (tmp_path / "c.yaml").write_text(file + IMAGE)
    (tmp_path / "none.yaml").write_text(file)
    assert run_here("validate", "c.yaml", cwd=tmp_path).code == 0
    result = run_here("validate", "none.yaml", cwd=tmp_path)
    assert (result.code, result.err[:47]) == (
        2,
        "zmqdist validate: none.yaml:1: kubernetes.image",
    ), result.err


# -- that the pods are a cluster -------------------------------------------------------------------

PROGRAM = """
    import json, os, sys
    import numpy as np
    import zmqdist as zd
    from beside import where

    assert sys.argv[1:] == ["--epochs", "3"]
    with zd.ParameterServerStrategy(None) as strategy:
        with strategy.scope():
            variable = zd.Variable(np.zeros(3), dtype="f4")
        variable.assign_add(np.ones(3, "f4"))
        coordinator = strategy.coordinator
        places = coordinator.fetch([coordinator.schedule(where, worker=index) for index in (0, 1)])
    print(json.dumps([variable.shape[0], places]))
"""

BESIDE = """
    import json, os

    def where():
        keys = sorted(os.listdir(os.environ["ZMQDIST_KEYS_DIR"]))
        return [json.loads(os.environ["TF_CONFIG"])["task"], [name for name in keys if not name.startswith("..")]]
"""


@pytest.mark.timeout(120)
@pytest.mark.processes("launch")
def test_pod_processes_run_program_to_end(config: Load, tmp_path: Path) -> None:
    for name, text in (("train.py", PROGRAM), ("beside.py", BESIDE)):
        (tmp_path / "app").mkdir(exist_ok=True)
        (tmp_path / "app" / name).write_text(textwrap.dedent(text))
    keygen(tmp_path / "keys")
    secret = {path.name: path.read_text() for path in (tmp_path / "keys").iterdir()}
    (tmp_path / "pods").mkdir()
    with Pods(render(config(TOP + JOBS + IMAGE)), secret, tmp_path / "pods", tmp_path) as cluster:
        program = cluster.pods["train-program"]
        assert program.ended(90.0) == 0, cluster.text()
        cluster.wait_until_alive("train-dispatcher-0", "train-ps-0", "train-ps-1")
        shape, places = json.loads(program.output.read_text())
        assert shape == 3
        keys = ["authorized", "server.pub", "worker.key"]
        assert places == [[{"type": "worker", "index": index}, keys] for index in (0, 1)]
