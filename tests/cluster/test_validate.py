"""`zmqdist validate`: one line and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.samples import MISTAKES, RIGHT
from tests.helpers import CommandResult, run_command
from zmqdist.cluster import schema
from zmqdist.launch.exit_codes import ExitCode
from zmqdist.transport.keys import keygen
from zmqdist_cli.validate import validate


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> CommandResult:
    return run_command(validate, *arguments)


def write(text: str) -> None:
    """The file, and the keys that it may name."""
    Path("c.yaml").write_text(text)
    keygen("keys")


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        ("the smallest", "ok: c: worker x 1 (slots 1); curve auto\n"),
        (
            "the page of the documentation",
            "ok: digits: dispatcher at 127.0.0.1:0, worker x 2 (slots 1), ps x 1; curve auto\n",
        ),
        (
            "everything",
            (
                "ok: big.cluster_1-a: dispatcher at [::1]:5050, worker x 2 (slots auto), ps x 2, "
                "chief x 1, evaluator x 1; "
                "curve true\n"
            ),
        ),
    ],
)
def test_right_file_is_one_line(sample: str, line: str) -> None:
    write(RIGHT[sample])
    result = run("c.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (ExitCode.OK, line, "")


def test_json_summary_hides_env() -> None:
    write(RIGHT["everything"])
    result = run("c.yaml", "--json")
    assert json.loads(result.stdout) == {
        "file": "c.yaml",
        "name": "big.cluster_1-a",
        "jobs": {
            "dispatcher": {"tasks": 1, "address": "[::1]:5050"},
            "worker": {
                "tasks": 2,
                "slots": "auto",
                "addresses": {"0": "node-a:5051", "7": "node-b:5051"},
            },
            "ps": {"tasks": 2, "addresses": {"0": "node-a:5052", "1": "node-b:5052"}},
            "chief": {"tasks": 1, "addresses": {"0": "node-a:5053"}},
            "evaluator": {"tasks": 1},
        },
        "curve": True,
    }


@pytest.mark.parametrize(("text", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_line_with_code_2(text: str, expected: str) -> None:
    Path("c.yaml").write_text(text)
    result = run("c.yaml", "--json")
    assert (result.exit_code, result.stdout) == (ExitCode.CONFIG, "")
    position = expected.partition(": ")[0]
    assert result.stderr.startswith(f"zmqdist validate: {position}: ")
    assert result.stderr.count("\n") == 1


def test_schema_needs_no_file() -> None:
    result = run("--schema")
    assert (result.exit_code, json.loads(result.stdout)) == (ExitCode.OK, schema())


def test_missing_file_is_a_usage_error() -> None:
    result = run()
    assert result.exit_code == ExitCode.USAGE
    assert "which CONFIG? (only --schema needs none)" in result.stderr


def test_exit_codes_are_documented() -> None:
    assert {name: int(code) for name, code in ExitCode.__members__.items()} == {
        "OK": 0,
        "PROGRAM_FAILED": 1,
        "USAGE": 2,
        "CONFIG": 2,
        "UNAVAILABLE": 3,
        "REFUSED": 4,
        "INTERRUPTED": 130,
    }
