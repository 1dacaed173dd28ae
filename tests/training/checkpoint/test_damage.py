"""Checkpoints that are damaged, unfinished, gone, or of a newer version; disks that are full."""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.training.helpers import sharded, variable
from zmqdist.errors import (
    DataLossError,
    FailedPreconditionError,
    NotFoundError,
    OpError,
    ResourceExhaustedError,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `a`, and of `emb` in three shards."""
    values = np.arange(18, dtype=np.float32).reshape(6, 3)
    return Path(
        zd.checkpoint.save(
            str(tmp_path / "c"), {"a": variable(values[:1]), "emb": sharded(values, 3)}
        )
    )


def shard(saved: Path, index: int) -> Path:
    [file] = saved.glob(f"*emb-{index:05d}-of-00003*")
    return file


def cut_off(saved: Path) -> None:
    with shard(saved, 1).open("r+b") as file:
        file.truncate(100)


def flip(saved: Path) -> None:
    data = bytearray(shard(saved, 1).read_bytes())
    data[len(data) // 2] ^= 1
    shard(saved, 1).write_bytes(data)


def swap_files(saved: Path) -> None:
    shard(saved, 1).write_bytes(shard(saved, 0).read_bytes())


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        lambda saved: shard(saved, 1).unlink(),
        r"No such file.*shard 1 of 3 of 'emb' \(rows 2 to 4\)",
    ),
    "cut off": (cut_off, r"it has 100 bytes, but \d+ were written; it holds shard 1 of 3 of 'emb'"),
    "empty": (
        lambda saved: shard(saved, 1).write_bytes(b""),
        "it has 0 bytes.*shard 1 of 3 of 'emb'",
    ),
    "one bit": (flip, r"not those that were written \(checksum\); it holds shard 1 of 3 of 'emb'"),
    "another shard's": (swap_files, "checksum.*shard 1 of 3 of 'emb'"),
    "a folder": (
        lambda saved: (shard(saved, 1).unlink(), shard(saved, 1).mkdir())[0],
        "directory.*shard 1 of 3",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_shard_is_named_and_changes_nothing(
    saved: Path, damage: Callable[[Path], None], message: str
) -> None:
    name = shard(saved, 1).name
    if damage is DAMAGE["a folder"][0]:
        shard(saved, 1).rename(saved / "away")
        (saved / name).mkdir()
    else:
        damage(saved)
    a, emb = variable(np.full((1, 3), 7, np.float32)), variable(np.full((6, 3), 7, np.float32))
    with pytest.raises(DataLossError, match=message) as caught:
        zd.checkpoint.restore(str(saved), {"a": a, "emb": emb})
    assert str(saved / name) in str(caught.value)
    assert (a.numpy() == 7).all()
    assert (emb.numpy() == 7).all()
    # what is whole can still be had
    assert zd.checkpoint.load(str(saved), ["a"])["a"].tolist() == [[0, 1, 2]]


def change(saved: Path, **changed: Any) -> None:
    whole = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(whole | changed))


MANIFESTS: dict[str, tuple[Callable[[Path], Any], type[OpError], str]] = {
    "not there": (lambda saved: shutil.rmtree(saved), NotFoundError, "checkpoint .*/c: not found"),
    "unfinished": (
        lambda saved: (saved / "manifest.json").unlink(),
        NotFoundError,
        "it has no manifest.json",
    ),
    "a folder of some": (
        lambda saved: shutil.move(
            saved / "manifest.json", (saved / "ckpt-1").mkdir() or saved / "ckpt-1"
        ),
        NotFoundError,
        "this is a folder of checkpoints: pass one of them, such as ckpt-1",
    ),
    "newer": (
        lambda saved: change(saved, format=99),
        FailedPreconditionError,
        "is of format 99, .* up to 1: install a newer",
    ),
    "empty": (
        lambda saved: (saved / "manifest.json").write_text(""),
        DataLossError,
        "manifest.json is damaged",
    ),
    "no JSON": (
        lambda saved: (saved / "manifest.json").write_bytes(b"\xff\xfe{"),
        DataLossError,
        "is damaged",
    ),
    "a list": (
        lambda saved: (saved / "manifest.json").write_text("[]"),
        DataLossError,
        "is damaged",
    ),
    "changed": (
        lambda saved: change(saved, crc32=1),
        DataLossError,
        "its contents do not match its checksum",
    ),
}


@pytest.mark.parametrize(("damage", "kind", "message"), MANIFESTS.values(), ids=MANIFESTS)
def test_bad_manifest_is_named(
    saved: Path, damage: Callable[[Path], Any], kind: type[OpError], message: str
) -> None:
    damage(saved)
    with pytest.raises(kind, match=message) as caught:
        zd.checkpoint.load(str(saved))
    assert str(saved) in str(caught.value)


def test_manifest_leads_to_no_other_folder(saved: Path) -> None:
    import zlib

    from zmqdist.training.checkpoint.manifest import _canonical

    body = json.loads((saved / "manifest.json").read_text())["checkpoint"]
    body["entries"]["a"]["pieces"][0]["file"] = "../secret.npz"
    change(saved, checkpoint=body, crc32=zlib.crc32(_canonical(body)))
    with pytest.raises(DataLossError, match="no file of a checkpoint is called"):
        zd.checkpoint.load(str(saved))


def test_random_damage_gives_an_error_of_ours(saved: Path) -> None:
    """Bytes are changed at random, with the checksums made to fit in every second case."""
    import zlib

    from zmqdist.training.checkpoint.manifest import _canonical

    dice = random.Random(4711)
    good = {file: file.read_bytes() for file in saved.iterdir()}
    refused = 0
    for attempt in range(120):
        for file, data in good.items():
            file.write_bytes(data)
        file = dice.choice(sorted(good))
        data = bytearray(good[file])
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.2:
            del data[dice.randrange(len(data)) :]
        file.write_bytes(data)
        if attempt % 2 and file.suffix == ".npz":
            body = json.loads(good[saved / "manifest.json"])["checkpoint"]
            for entry in body["entries"].values():
                for piece in entry["pieces"]:
                    if piece["file"] == file.name:
                        piece.update(size=len(data), crc32=zlib.crc32(data))
            change(saved, checkpoint=body, crc32=zlib.crc32(_canonical(body)))
        try:
            zd.checkpoint.load(str(saved))
        except OpError:
            refused += 1
    assert refused > 60


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """Afterwards no file may be longer than so many bytes: what a full disk says, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("existing", [False, True])
def test_full_disk_keeps_the_former_checkpoint(
    tmp_path: Path, small_files: Callable[[int], None], existing: bool
) -> None:
    path = tmp_path / "c"
    if existing:
        zd.checkpoint.save(str(path), {"w": variable(np.ones(3))})
    before = sorted(tmp_path.rglob("*"))
    small_files(4096)
    with pytest.raises(
        ResourceExhaustedError, match=r"00000-w-00000-of-00002\.\w+\.npz: File too large"
    ):
        zd.checkpoint.save(str(path), {"w": sharded(np.zeros(100_000), 2)})
    small_files(resource.RLIM_INFINITY)
    assert sorted(tmp_path.rglob("*")) == before
    if existing:
        assert zd.checkpoint.load(str(path))["w"].tolist() == [1, 1, 1]


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OpError, match="file/c"):
        zd.checkpoint.save(str(tmp_path / "file" / "c"), {"n": 1})
