"""Every name that reaches a file: what a peer or a file says leaves no folder, and nothing that
lies there holds anybody up.

A name comes from a user, who may name any path, or from elsewhere (a peer, a file that was read),
and then it is no path at all. The two tables have a row for each place; a new one gets a row.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from zmqdist import checkpoint, errors
from zmqdist.cluster.config import ClusterConfig
from zmqdist.data import Dataset, service
from zmqdist.data.service.dispatcher.journal import Journal
from zmqdist.data.service.dispatcher.store import DatasetStore
from zmqdist.errors import ConfigError
from zmqdist.transport import keys

WITHIN_S = 20.0
REFUSALS = (errors.OpError, OSError, ValueError, ConfigError)
"""What a name may end with: an error that says so. Anything else is a fault, and so is no end at
all."""


def ends(act: Callable[[], Any], pipe: Path | None = None) -> str:
    """Have a thread do it. Returns the class of the refusal, or "done".

    Args:
      pipe: opened for both ends when it is late, so that the thread can end.
    """
    outcomes: list[BaseException | None] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            outcomes.append(error)
        else:
            outcomes.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(WITHIN_S if pipe is None else 5.0)
    if late := thread.is_alive():
        assert pipe is not None
        end = os.open(pipe, os.O_RDWR)
        thread.join(1.0)
        os.close(end)
        thread.join(WITHIN_S)
    assert not late, "a named pipe in the place of a file holds the reader up"
    if outcomes[0] is None:
        return "done"
    assert isinstance(outcomes[0], REFUSALS), repr(outcomes[0])
    return type(outcomes[0]).__name__


def saved(folder: Path) -> Path:
    Dataset.range(5).save(str(folder / "saved"))
    return folder / "saved"


def checkpointed(folder: Path) -> Path:
    zd.checkpoint.save(folder / "ckpt", {"x": zd.Variable(np.arange(3.0), name="x")})
    return folder / "ckpt"


def keyed(folder: Path) -> Path:
    keys.keygen(folder / "keys")
    return folder / "keys"


NAMED: dict[str, Callable[[str], Any]] = {
    "cache file": lambda path: list(Dataset.range(3).cache(path.removesuffix(".data"))),
    "saved dataset": lambda path: list(Dataset.load(path)),
    "folder of a save": lambda path: Dataset.range(3).save(path),
    "place of a save": lambda path: Dataset.range(3).save(
        path + ".there", checkpoint_args={"directory": path}
    ),
    "text file": lambda path: list(zd.data.TextLineDataset(path)),
    "records": lambda path: list(zd.data.TFRecordDataset(path)),
    "checkpoint to read": checkpoint.load,
    "checkpoint to write": lambda path: checkpoint.save(path, {"x": zd.Variable(1.0)}),
    "checkpoints": lambda path: checkpoint.latest_checkpoint(path),
    "work_dir, datasets": lambda path: DatasetStore(path).put("a", "x"),
    "work_dir, journal": lambda path: Journal(path).load(),
    "token": keys.load,
    "keys to write": keys.keygen,
    "keys of a role": lambda path: keys.load_role(path, "submit"),
    "keys of the server": keys.load_server_public,
    "who is authorized": keys.load_authorized,
    "cluster file": ClusterConfig.load,
}
"""A user's names: any path will do, and what cannot be opened is an error."""


@pytest.mark.parametrize("place", NAMED)
def test_impossible_file_name_is_refused(place: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.data"
    os.mkfifo(pipe, 0o600)
    nowhere = tmp_path / "nowhere.data"
    nowhere.symlink_to(nowhere)
    if place == "cache file":  # which is written beside it and takes the place of a link
        nowhere.unlink()
        nowhere.mkdir()
    for name in (f"{tmp_path}/a\0b", f"{tmp_path}/{'x' * 5000}", str(nowhere)):
        assert ends(lambda name=name: NAMED[place](name)) != "done" or place == "checkpoints", name  # type: ignore[misc]
    assert ends(lambda: NAMED[place](str(pipe)), pipe) != "done" or place == "checkpoints"
    assert {path.name for path in tmp_path.iterdir()} == {"pipe.data", "nowhere.data"}


INSIDE: dict[str, tuple[Callable[[Path], Path], str, Callable[[Path], Any]]] = {
    "saved dataset": (saved, "dataset.json", lambda path: list(Dataset.load(str(path)))),
    "elements": (saved, "*/shard_00000", lambda path: list(Dataset.load(str(path)))),
    "manifest": (checkpointed, "manifest.json", checkpoint.load),
    "piece": (checkpointed, "*.npz", checkpoint.load),
    "secret": (keyed, "submit.key", lambda path: keys.load_role(path, "submit")),
    "public key": (keyed, "server.pub", keys.load_server_public),
    "authorized": (keyed, "authorized", keys.load_authorized),
}
"""What lies in a folder: who makes it, its file, who reads it."""


@pytest.mark.parametrize("place", INSIDE)
def test_pipe_in_place_of_file_blocks_no_process(place: str, tmp_path: Path) -> None:
    make, pattern, read = INSIDE[place]
    folder = make(tmp_path)
    (file,) = folder.glob(pattern)
    assert ends(lambda: read(folder)) == "done"
    file.unlink()
    os.mkfifo(file, 0o600)
    assert ends(lambda: read(folder), file) != "done"


def spoil_run(folder: Path, name: str) -> Callable[[], Any]:
    document = json.loads((saved(folder) / "dataset.json").read_text())
    (folder / "saved" / "dataset.json").write_text(json.dumps({**document, "run": name}))
    return lambda: list(Dataset.load(str(folder / "saved")))


def spoil_shard(folder: Path, name: str) -> Callable[[], Any]:
    document = json.loads((saved(folder) / "dataset.json").read_text())
    (folder / "saved" / "dataset.json").write_text(json.dumps({**document, "files": [name]}))
    return lambda: list(Dataset.load(str(folder / "saved")))


def spoil_checkpoint(folder: Path, name: str) -> Callable[[], Any]:
    """A save that was cut off, whose place says that its run lies elsewhere: it would cut off and
    delete what is there."""

    def numbers(fail: bool) -> Dataset:
        return Dataset.range(9).map(lambda x: 1 // 0 if fail and x == 5 else x)

    def save(fail: bool) -> None:
        checkpoint_args = {"directory": str(folder / "place"), "checkpoint_interval": 2}
        numbers(fail).save(str(folder / "saved"), checkpoint_args=checkpoint_args)

    with pytest.raises(ZeroDivisionError):
        save(True)
    kept = folder / "place" / "save.json"
    document = json.loads(kept.read_text())
    document["fingerprint"] = numbers(False).fingerprint()
    document["place"]["run"] = name
    kept.write_text(json.dumps(document))
    return lambda: save(False)


def spoil_piece(folder: Path, name: str) -> Callable[[], Any]:
    manifest = checkpointed(folder) / "manifest.json"
    whole = json.loads(manifest.read_text())
    for entry in whole["checkpoint"]["entries"].values():
        entry["pieces"][0]["file"] = name
    body = json.dumps(whole["checkpoint"], sort_keys=True, separators=(",", ":")).encode()
    manifest.write_text(json.dumps({**whole, "crc32": zlib.crc32(body)}))
    return lambda: checkpoint.load(folder / "ckpt")


def put_dataset(folder: Path, name: str) -> Callable[[], Any]:
    def put() -> None:
        store = DatasetStore(str(folder / "work"))
        store.put(name, "text")
        assert store.get(name) == "text"

    return put


def name_cluster(folder: Path, name: str) -> Callable[[], Any]:
    file = folder / "cluster.yaml"
    file.write_text(json.dumps({"name": name, "jobs": {"worker": {"count": 1}}, "program": "true"}))
    return lambda: ClusterConfig.load(str(file))


SAID: dict[str, Callable[[Path, str], Callable[[], Any]]] = {
    "run of a saved dataset": spoil_run,
    "file of a saved dataset": spoil_shard,
    "run of a save that goes on": spoil_checkpoint,
    "piece of a checkpoint": spoil_piece,
    "name of a cluster": name_cluster,
}
"""Names that are read from files: only one that we could have written ourselves is taken."""


def traversing(folder: Path) -> list[str]:
    """Names that lead to `folder`/outside, and some that no file has."""
    return [
        "../outside",
        "../../outside",
        f"{folder}/outside",
        "sub/../../outside",
        "..",
        ".",
        "",
        "a\0b",
        "x" * 5000,
        "../outside\0",
        "~/outside",
    ]


def guarded(folder: Path) -> Path:
    """A file that must be as it is afterwards."""
    (folder / "outside").mkdir()
    kept = folder / "outside" / "kept"
    kept.write_text("mine")
    return kept


@pytest.mark.parametrize("number", range(11))
@pytest.mark.parametrize("place", SAID)
def test_names_in_files_stay_in_folder(place: str, number: int, tmp_path: Path) -> None:
    kept = guarded(tmp_path)
    act = SAID[place](tmp_path, traversing(tmp_path)[number])
    assert ends(act) in ("DataLossError", "ValueError", "ConfigError", "InvalidArgumentError")
    assert (kept.read_text(), list(kept.parent.iterdir())) == ("mine", [kept])


@pytest.mark.parametrize("number", range(11))
def test_dataset_id_of_any_text_stays_in_folder(number: int, tmp_path: Path) -> None:
    kept = guarded(tmp_path)
    assert ends(put_dataset(tmp_path, traversing(tmp_path)[number])) == "done"
    assert (kept.read_text(), list(kept.parent.iterdir())) == ("mine", [kept])
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "work"}


def test_symlink_is_not_written_through(tmp_path: Path) -> None:
    """What the dispatcher and `keygen` write goes to a new file, and over a link, never to where it
    leads."""
    kept = guarded(tmp_path)
    (tmp_path / "work" / "datasets").mkdir(parents=True, mode=0o700)
    store = DatasetStore(str(tmp_path / "work"))
    (tmp_path / "work" / "datasets" / "a.tmp").symlink_to(kept)
    with pytest.raises(errors.OpError):
        store.put("a", "x")
    (tmp_path / "work" / "datasets" / "b").symlink_to(kept)
    store.put("b", "x")
    folder = keyed(tmp_path)
    for name in ("server.key", "authorized"):
        (folder / name).unlink()
        (folder / name).symlink_to(kept)
    keys.keygen(folder, force=True)
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("kind", ["a\0b", "x" * 5000, "y/" * 3000, "pipe"])
def test_dispatcher_survives_impossible_save_path(kind: str, tmp_path: Path) -> None:
    config = service.DispatcherConfig(work_dir=str(tmp_path / "work"), fault_tolerant_mode=True)
    with service.DispatchServer(config) as dispatcher:
        path = tmp_path / "there"
        if kind == "pipe":
            path.mkdir()
            os.mkfifo(path / "snapshot.metadata", 0o600)
        name = str(path) if kind == "pipe" else f"{tmp_path}/{kind}"
        save = lambda: zd.data.experimental.distributed_save(
            Dataset.range(5), name, dispatcher.target
        )
        assert ends(save, path / "snapshot.metadata" if kind == "pipe" else None) != "done"
        service.register_dataset(dispatcher.target, Dataset.range(3))
