"""Commands of a monitor, which has the key of the role `observe` and no other."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest

from tests.cli.conftest import Open
from tests.cli.helpers import Ended, run_here
from tests.cli.test_dashboard import facts_of
from tests.cli.test_status import Screen
from tests.launch.helpers import eventually
from tests.observe.dashboard.visitor import Visitor
from zmqdist.coordinator import ClusterCoordinator
from zmqdist.transport import keys


@pytest.fixture(scope="module")
def all_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    keys.keygen(folder)
    return folder


@pytest.fixture
def observer(all_keys: Path, tmp_path: Path) -> str:
    """The folder of a monitor."""
    folder = tmp_path / "observer"
    folder.mkdir(mode=0o700)
    for name in ("observe.key", "server.pub"):
        shutil.copy(all_keys / name, folder / name)
    return str(folder)


@pytest.fixture
def target(all_keys: Path, terminal: Open, monkeypatch: pytest.MonkeyPatch) -> str:
    """The "host:port" of a dispatcher with a worker, which has run a function that prints."""
    monkeypatch.setenv("ZMQDIST_KEYS_DIR", str(all_keys))
    address = terminal("dispatcher", "--port", "0").saw("zmq://").partition("zmq://")[2]
    terminal("worker", "--dispatcher", address).saw(f" of {address}: ")
    with ClusterCoordinator(address) as coordinator:
        coordinator.submit(print, "hello").result(20)
    monkeypatch.delenv("ZMQDIST_KEYS_DIR")
    return address


def as_observer(command: str, target: str, observer: str, *words: str) -> Ended:
    return run_here(command, target, *words, "--keys", observer, "--timeout", "20")


def test_observer_reads_status_stacks_profile_and_logs(
    target: str, observer: str, tmp_path: Path
) -> None:
    output = tmp_path / "job.json"
    shown = {
        "status": as_observer("status", target, observer, "--json"),
        "top": as_observer("top", target, observer, "--json"),
        "stack": as_observer("stack", target, observer, "worker:0"),
        "profile": as_observer("profile", target, observer, "--seconds", "0.2", "-o", str(output)),
    }
    codes = {command: (ended.code, ended.err) for command, ended in shown.items()}
    assert codes == dict.fromkeys(shown, (0, ""))
    assert json.loads(shown["top"].out)["workers"][0]["name"] == "worker:0"
    assert "slot 0, pid " in shown["stack"].out
    assert "profiles" in json.loads(output.read_text())
    # the result may overtake the line
    eventually(
        lambda: as_observer("logs", target, observer).out == "[worker-0] hello\n", "the line"
    )


def test_observer_changes_nothing(target: str, observer: str) -> None:
    for command, *words in (("shutdown",), ("drain", "worker:0"), ("keys", "list")):
        where = [words[0], target] if command == "keys" else [target, *words]
        assert run_here(command, *where, "--keys", observer, "--timeout", "20").code != 0
    refused = run_here("call", target, "shutdown", "0.0", "--role", "observe", "--keys", observer)
    assert refused.code == 4
    assert "role observe may not call" in refused.err
    assert as_observer("status", target, observer).code == 0


def test_observer_has_a_live_screen(target: str, observer: str) -> None:
    screen = Screen("top", target, "--keys", observer)
    try:
        screen.saw("worker:0")
    finally:
        screen.close()


def test_observer_serves_metrics(target: str, observer: str, terminal: Open) -> None:
    served = terminal("metrics", target, "--keys", observer, "--bind", "127.0.0.1:0")
    url = served.saw("metrics: ").partition("metrics: ")[2]
    with urllib.request.urlopen(url, timeout=20) as reply:
        text = reply.read().decode()
    assert "\nzmqdist_up 1.0\n" in text
    assert 'zmqdist_workers{state="alive"} 1.0' in text


def test_observer_serves_a_dashboard(target: str, observer: str, terminal: Open) -> None:
    served = terminal("dashboard", target, "--keys", observer)
    assert facts_of(served)["address"] == target
    visitor = Visitor(served.saw("a new one: ").partition("a new one: ")[2])
    bearer = f"Bearer {visitor.token()}"
    for question in ("stack?worker=worker:0", "logs?worker=worker:0&since=-1"):
        _, _, body = visitor.request(f"/api/ask/{question}", Authorization=bearer)
        assert "answer" in json.loads(body)
