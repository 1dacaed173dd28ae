"""The cluster file: each mistake has one sentence, and what is right survives every way round."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.samples import MISTAKES, RIGHT, TOP
from zmqdist import limits
from zmqdist.cluster import CONFIG_ENV, ClusterConfig, ClusterSpec, RuntimeConfig, config
from zmqdist.cluster.file_sections import Job, JobsConfig, WorkerJob
from zmqdist.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def _both_parsers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(yaml, request.param):
        pytest.skip("this PyYAML was built without libyaml")
    monkeypatch.setattr(config, "_LOADER", getattr(yaml, request.param))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str) -> ClusterConfig:
    Path("c.yaml").write_text(text)
    return ClusterConfig.load("c.yaml")


@pytest.mark.usefixtures("_both_parsers", "folder")
def test_mistake_names_file_line_and_key() -> None:
    for name, (text, expected) in MISTAKES.items():
        try:
            read(text)
        except ConfigError as error:
            assert (  # noqa: PT017
                str(error).replace("found undefined alias 'x'", "found undefined alias") == expected
            ), name
        else:
            raise AssertionError(f"{name}: nothing was found wrong")


@pytest.mark.usefixtures("folder")
def test_surrogate_character_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "_LOADER", yaml.SafeLoader)
    with pytest.raises(ConfigError) as caught:
        read('name: c\nprogram: "\\ud800"\n')
    assert str(caught.value) == "c.yaml:2: program: has a character that no text can have"


@pytest.mark.usefixtures("_both_parsers", "folder")
@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT.keys())
def test_config_survives_dict_json_and_yaml(text: str) -> None:
    loaded = read(text)
    assert read(loaded.to_yaml()) == loaded
    assert ClusterConfig.from_dict(json.loads(json.dumps(loaded.to_dict()))) == loaded


@pytest.mark.usefixtures("folder")
def test_absent_keys_have_defaults() -> None:
    loaded = read(TOP + "jobs: {dispatcher: {}, worker: {count: 2}}\n")
    dispatcher, worker = loaded.jobs.dispatcher, loaded.jobs.worker
    assert dispatcher is not None
    assert worker is not None
    assert (dispatcher.address, dispatcher.work_dir) == ("127.0.0.1:0", None)
    assert (dispatcher.lease_s, dispatcher.reconnect_grace_s) == (
        limits.LEASE_S,
        limits.RECONNECT_GRACE_S,
    )
    assert (dispatcher.attempts_max, dispatcher.queue_max) == (
        limits.ATTEMPTS_MAX,
        limits.QUEUE_MAX,
    )
    assert dispatcher.queue_bytes_max is None
    assert (worker.slots, worker.env, worker.tasks) == (1, {}, None)
    assert (worker.orphan_limit_s, worker.cancel_grace_s) == (
        limits.ORPHAN_LIMIT_S,
        limits.CANCEL_GRACE_S,
    )
    assert (loaded.security.curve, loaded.security.keys, loaded.runtime) == ("auto", None, None)


@pytest.mark.usefixtures("folder")
def test_keys_of_file_arrive() -> None:
    loaded = read(RIGHT["everything"])
    dispatcher, worker = loaded.jobs.dispatcher, loaded.jobs.worker
    assert dispatcher is not None
    assert worker is not None
    assert (dispatcher.address, dispatcher.work_dir, dispatcher.lease_s) == (
        "[::1]:5050",
        "journal",
        5.0,
    )
    assert (dispatcher.reconnect_grace_s, dispatcher.attempts_max, dispatcher.queue_max) == (
        0.5,
        1,
        10,
    )
    assert dispatcher.queue_bytes_max == 5_000_000_000
    assert (worker.addresses(), worker.indices()) == ({0: "node-a:5051", 7: "node-b:5051"}, [0, 7])
    assert (worker.slots, worker.orphan_limit_s, worker.cancel_grace_s) == ("auto", 1.5, 0.0)
    assert worker.env == {"A": "1", "B": ""}
    assert loaded.command == ("python", "train me.py", "--fast")
    assert (loaded.security.curve, loaded.security.keys) == (True, "keys")


@pytest.mark.usefixtures("folder")
def test_spec_has_jobs_with_addresses() -> None:
    assert read(RIGHT["everything"]).spec == ClusterSpec(
        {
            "dispatcher": ["[::1]:5050"],
            "worker": {0: "node-a:5051", 7: "node-b:5051"},
            "ps": ["node-a:5052", "node-b:5052"],
            "chief": ["node-a:5053"],
        }
    )
    assert read(RIGHT["the page of the documentation"]).spec == ClusterSpec({})


@pytest.mark.usefixtures("folder")
def test_tf_config_leaves_the_dispatcher_out() -> None:
    assert json.loads(read(RIGHT["everything"]).tf_config("worker", 7)) == {
        "cluster": {
            "worker": {"0": "node-a:5051", "7": "node-b:5051"},
            "ps": ["node-a:5052", "node-b:5052"],
            "chief": ["node-a:5053"],
        },
        "task": {"type": "worker", "index": 7},
        "rpc_layer": "zmq",
    }


@pytest.mark.usefixtures("folder")
def test_program_is_chief_without_such_job() -> None:
    task = json.loads(read(RIGHT["the smallest"]).tf_config("chief", 0))["task"]
    assert task == {"type": "chief", "index": 0}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("job", "index"), [("worker", 1), ("worker", -1), ("chief", 1), ("ps", 0), ("dispatcher", 0)]
)
def test_tf_config_of_a_task_that_is_not_there_is_a_value_error(job: str, index: int) -> None:
    with pytest.raises(ValueError, match=f"cluster 'c' has no task {index} of job '{job}'"):
        read(TOP + "jobs: {dispatcher: {}, worker: {count: 1}}\n").tf_config(job, index)


@pytest.mark.usefixtures("folder")
def test_command_line_split_like_shell() -> None:
    loaded = read(
        "name: c\njobs: {worker: {count: 1}}\nprogram: python 'my train.py' --lr=0.1 $HOME\n"
    )
    assert loaded.command == ("python", "my train.py", "--lr=0.1", "$HOME")


def test_auto_slots_are_the_cores_that_this_process_may_use() -> None:
    assert WorkerJob(count=1, slots="auto").slots_here() == len(os.sched_getaffinity(0))
    assert WorkerJob(count=1, slots=3).slots_here() == 3


def test_env_values_never_shown() -> None:
    config_object = ClusterConfig(
        name="c", program="x", jobs=JobsConfig(ps=Job(count=1, env={"PASSWORD": "hunter2"}))
    )
    assert "PASSWORD" in repr(config_object)
    assert "hunter2" not in repr(config_object)
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.from_dict(
            {
                **config_object.to_dict(),
                "jobs": {"ps": {"count": 1, "env": {"PASSWORD": ["hunter2"]}}},
            }
        )
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "c"}, "(dict):1: jobs: required key is missing"),
        (
            {"name": "c", "program": "x", "jobs": {"worker": {"tasks": {"1": "a:0"}}}},
            (
                "(dict):1: jobs.worker.tasks[1]: bad address 'a:0': the other tasks must know the "
                "port (or use count)"
            ),
        ),
    ],
)
def test_mistake_in_dict_names_key(data: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.from_dict(data)
    assert str(caught.value) == expected


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("absent.yaml", "absent.yaml:1: (file): cannot be read: No such file or directory"),
        (".", ".:1: (file): cannot be read: Is a directory"),
        ("/proc/self/mem", "/proc/self/mem:1: (file): cannot be read: Input/output error"),
    ],
)
def test_unreadable_file_is_a_config_error(path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.load(path)
    assert str(caught.value) == expected


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.usefixtures("folder")
def test_foreign_file_is_a_config_error() -> None:
    Path("c.yaml").touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        ClusterConfig.load("c.yaml")


def test_bad_utf8_error_names_line(folder: Path) -> None:
    (folder / "c.yaml").write_bytes(b"name: c\nprogram: \xff\n")
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.load("c.yaml")
    assert str(caught.value) == "c.yaml:2: (file): is not UTF-8: byte 0xff"


# -- from parent to child --------------------------------------------------------------------------


def test_child_reads_resolved_file_of_parent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = ClusterConfig(
        name="c",
        program=["python", "x.py"],
        jobs=JobsConfig(worker=WorkerJob(tasks={0: "127.0.0.1:5", 2: "127.0.0.1:6"}, slots=2)),
        runtime=RuntimeConfig(dispatcher="zmq://127.0.0.1:4", token_file="token"),
    )
    (folder / "resolved.yaml").write_text(resolved.to_yaml())
    monkeypatch.setenv(CONFIG_ENV, "resolved.yaml")
    assert ClusterConfig.from_environment() == resolved
    assert ClusterConfig.from_dict(json.loads(json.dumps(resolved.to_dict()))) == resolved
    with pytest.raises(ConfigError, match="runtime: is written by the launcher only"):
        ClusterConfig.load("resolved.yaml")


@pytest.mark.parametrize("value", [None, ""])
def test_config_absent_without_variable(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "x")
    if value is None:
        monkeypatch.delenv(CONFIG_ENV)
    else:
        monkeypatch.setenv(CONFIG_ENV, value)
    assert ClusterConfig.from_environment() is None


@pytest.mark.usefixtures("folder")
def test_variable_without_file_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, "gone.yaml")
    with pytest.raises(
        ConfigError, match=r"^gone.yaml:1: \(file\): cannot be read: No such file or directory$"
    ):
        ClusterConfig.from_environment()


# -- the files that ship ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_files_in_configs_are_right(path: Path) -> None:
    assert ClusterConfig.load(path).name


@pytest.mark.parametrize(
    ("file", "curve"), [("digits.yaml", "auto"), ("digits-curve.yaml", True), ("ssh.yaml", "auto")]
)
def test_main_job_has_two_workers_on_loopback(file: str, curve: object) -> None:
    loaded = ClusterConfig.load(CONFIGS / file)
    assert (loaded.name, loaded.program, loaded.security.curve) == (
        "digits",
        "python examples/digits.py",
        curve,
    )
    assert loaded.jobs.worker == WorkerJob(count=2, slots=1)
    assert loaded.jobs.dispatcher is not None
    assert loaded.jobs.dispatcher.address == "127.0.0.1:0"


# -- any bytes, any texts --------------------------------------------------------------------------

_PLAIN = "name jobs worker tasks count { } [ ] &a *a !!int !x << 1 -1 1e999 .nan yes ~ ' # | > % @ --- 2026-01-01 1:30"
_WORDS = st.sampled_from([*_PLAIN.split(), '"', ": ", "\n", "  ", "- ", "? ", "\t"])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any") / "c.yaml"


few = settings(max_examples=50, deadline=None)


@few
@given(
    data=st.binary(max_size=200)
    | st.lists(_WORDS, max_size=30).map(lambda words: "".join(words).encode())
)
def test_arbitrary_bytes_raise_only_config_error(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert isinstance(ClusterConfig.load(file), ClusterConfig)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@few
@given(
    env=st.dictionaries(_TEXT.filter(lambda name: name and "=" not in name), _TEXT),
    words=st.lists(_TEXT, min_size=1),
)
def test_text_survives_way_to_child(file: Path, env: dict[str, str], words: list[str]) -> None:
    config_object = ClusterConfig(
        name="c", program=["x", *words], jobs=JobsConfig(worker=WorkerJob(count=1, env=env))
    )
    file.write_text(config_object.to_yaml())
    assert ClusterConfig.load(file) == config_object
