"""Settings of the data service: what options of the roles and keys of a cluster file make of a
config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import run_here
from zmqdist.launch import roles
from zmqdist.launch.exit_codes import ExitCode

Capture = Callable[..., Any]

WORKER = {
    "--tag": ("worker_tags", "COLOCATED", ("COLOCATED",)),
    "--dispatcher-timeout": ("dispatcher_timeout_ms", "5000", 5000),
    "--cross-trainer-cache-size": ("cross_trainer_cache_size_bytes", "1000", 1000),
    "--snapshot-max-chunk-size": ("snapshot_max_chunk_size_bytes", "2000", 2000),
    "--start-delay": ("schedule_start_delay_s", "0.5", 0.5),
    "--start-delay-max": ("schedule_start_delay_max_s", "2", 2.0),
}
DISPATCHER = {
    "--job-gc-timeout": ("job_gc_timeout_ms", "-1", -1),
    "--job-gc-check-interval": ("job_gc_check_interval_ms", "0", 0),
    "--worker-timeout": ("worker_timeout_ms", "7000", 7000),
    "--client-timeout": ("client_timeout_ms", "8000", 8000),
    "--deployment-mode": ("deployment_mode", "colocated", "COLOCATED"),
}


@pytest.fixture
def config_of(monkeypatch: pytest.MonkeyPatch) -> Capture:
    """The config with which a command would run its role."""

    def run(*words: str) -> Any:
        configs: list[Any] = []

        def keep(config: Any, **_: Any) -> int:
            configs.append(config)
            return ExitCode.OK

        monkeypatch.setattr(roles, "run_worker", keep)
        monkeypatch.setattr(roles, "run_dispatcher", keep)
        result = run_here(*words)
        assert (result.code, result.err) == (ExitCode.OK, "")
        return configs[0]

    return run


def written(folder: Path, job: str, key: str, value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    path = folder / "cluster.yaml"
    path.write_text(
        "name: c\njobs: {dispatcher: {address: 127.0.0.1:1}, worker: {count: 1}}\n"
        "program: python x.py\n".replace(f"{job}: {{", f"{job}: {{{key}: {value}, ")
    )
    return str(path)


@pytest.mark.parametrize(
    ("job", "option"), [("worker", o) for o in WORKER] + [("dispatcher", o) for o in DISPATCHER]
)
def test_option_and_key_set_the_same_field(
    config_of: Capture, tmp_path: Path, job: str, option: str
) -> None:
    field, text, value = (WORKER | DISPATCHER)[option]
    address = ["--dispatcher", "127.0.0.1:1"] if job == "worker" else []
    by_option = config_of(job, *address, option, text)
    file = written(tmp_path, job, field, value)
    by_key = config_of(job, "--config", file)
    assert getattr(by_option, field) == getattr(by_key, field) == value
    assert getattr(config_of(job, *address), field) != value


def test_option_wins_over_key(config_of: Capture, tmp_path: Path) -> None:
    file = written(tmp_path, "worker", "dispatcher_timeout_ms", 5000)
    config = config_of("worker", "--config", file, "--dispatcher-timeout", "0")
    assert config.dispatcher_timeout_ms == 0


def test_flag_drops_dynamic_jobs(config_of: Capture, tmp_path: Path) -> None:
    file = written(tmp_path, "dispatcher", "gc_dynamic_sharding_jobs", "true")
    assert config_of("dispatcher", "--config", file).gc_dynamic_sharding_jobs
    assert config_of("dispatcher", "--gc-dynamic-sharding-jobs").gc_dynamic_sharding_jobs
    assert not config_of("dispatcher").gc_dynamic_sharding_jobs


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("dispatcher", "--deployment-mode", "NEAR"), "'NEAR' is not one of"),
        (("dispatcher", "--job-gc-timeout", "-2"), "-2 is not in the range x>=-1"),
        (("worker", "--start-delay", "-1"), "'-1' is not a number of seconds: wanted 0 or more"),
        (("worker", "--cross-trainer-cache-size", "x"), "'x' is not a valid integer range"),
        (("worker", "--dispatcher", "localhost:1", "--tag", ""), "Worker tags cannot be empty"),
    ],
)
def test_wrong_setting_is_named(words: tuple[str, ...], text: str) -> None:
    result = run_here(*words)
    assert result.code != ExitCode.OK
    assert text in result.err
