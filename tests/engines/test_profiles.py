"""`zmqdist profile` with the programs of others: samples by py-spy, and the published schema of the
files that speedscope opens (speedscope/, of its release 1.25.0).

Needs pip install zmqdist[engines].
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import zmqdist as zd
from tests.cli.helpers import Ended, run_here
from tests.scheduling.work import until

SCHEMA = json.loads((Path(__file__).parent / "speedscope" / "file-format-schema.json").read_text())
SCRIPTS = sysconfig.get_path("scripts")


def spin(flag: Path) -> None:
    flag.touch()
    while True:
        pass


@pytest.fixture(params=["own", "py-spy"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have workers find py-spy, or not."""
    folders = [
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not Path(folder, "py-spy").exists()
    ]
    if request.param == "py-spy":
        if not Path(SCRIPTS, "py-spy").exists():
            pytest.skip("needs pip install zmqdist[engines]")
        folders.append(SCRIPTS)
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    return str(request.param)


@pytest.fixture
def cluster(sampler: str) -> Iterator[zd.local_cluster]:
    with zd.local_cluster(workers=1, slots=2) as cluster:
        yield cluster


def recorded(cluster: zd.local_cluster, output: Path) -> tuple[Ended, Any]:
    """Record a profile; return what the command printed, and the file, which fits the schema."""
    secret = str(cluster.credentials.token_file)
    words = ["profile", cluster.target, "--seconds", "1", "-o", str(output)]
    shown = run_here(*words, "--token-file", secret, "--timeout", "20")
    document = json.loads(output.read_text())
    jsonschema.validate(document, SCHEMA)
    return shown, document


def test_profile_of_a_busy_slot_fits_the_schema(
    cluster: zd.local_cluster, sampler: str, tmp_path: Path
) -> None:
    with cluster.coordinator() as coordinator:
        coordinator.submit(spin, tmp_path / "begun")
        until((tmp_path / "begun").exists)
        shown, document = recorded(cluster, tmp_path / "job.json")
        cluster.kill_worker(0)  # the function never ends
    assert f"s  spin ({__file__})\n" in shown.out
    assert {"name": "spin", "file": __file__} in document["shared"]["frames"]


def test_profile_of_idle_slots_fits_the_schema(
    cluster: zd.local_cluster, sampler: str, tmp_path: Path
) -> None:
    # the slots may still be starting
    until(lambda: recorded(cluster, tmp_path / "job.json")[1]["profiles"][0]["samples"] == [])


def test_schema_refuses_another_file() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"traceEvents": []}, SCHEMA)
