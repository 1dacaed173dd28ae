"""`CheckpointManager` and `checkpoints_iterator`, also with processes that are killed while they
save."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.scheduling.work import until
from tests.training.helpers import variable
from zmqdist.checkpoint import (
    Checkpoint,
    CheckpointManager,
    checkpoints_iterator,
    latest_checkpoint,
)
from zmqdist.errors import NotFoundError, OpError, ResourceExhaustedError, UnknownError
from zmqdist.training.checkpoint.checkpoint_iterator import checkpoints
from zmqdist.training.checkpoint.reader import CheckpointReader

PATIENCE_S = 30.0


def names(manager: CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


def test_last_checkpoints_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path / "d"), max_to_keep=2)
    assert (manager.checkpoints, manager.latest_checkpoint) == ([], None)
    assert manager.save() == str(tmp_path / "d" / "ckpt-1")
    manager.save(7)
    assert manager.save() == manager.latest_checkpoint == str(tmp_path / "d" / "ckpt-8")
    assert names(manager) == ["ckpt-7", "ckpt-8"]
    assert latest_checkpoint(str(tmp_path / "d")) == manager.latest_checkpoint
    assert [each.name for each in sorted((tmp_path / "d").iterdir())] == ["ckpt-7", "ckpt-8"]


def test_max_to_keep_none_keeps_all(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path), max_to_keep=None)
    for _ in range(5):
        manager.save()
    assert len(manager.checkpoints) == 5


def test_latest_is_the_last_saved(
    tmp_path: Path,
) -> None:
    state = {"n": 0}
    manager = CheckpointManager(state, str(tmp_path), max_to_keep=2)
    for step in (10, 11, 12):
        manager.save(step)
    state["n"] = 5
    manager.save(5)
    assert names(manager) == ["ckpt-12", "ckpt-5"]
    state["n"] = 12
    manager.save(12)
    assert names(manager) == ["ckpt-5", "ckpt-12"]
    assert zd.checkpoint.load(manager.latest_checkpoint or "")["n"] == 12


def test_restarted_program_goes_on(tmp_path: Path) -> None:
    first = {"w": variable(np.arange(3.0)), "run": {"epoch": 4}}
    assert CheckpointManager(first, str(tmp_path)).restore_or_initialize() is None
    CheckpointManager(first, str(tmp_path)).save(40)
    again: dict[str, Any] = {"w": variable(np.zeros(3)), "run": {"epoch": 0}}
    manager = CheckpointManager(again, str(tmp_path))
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-40")
    assert (again["w"].numpy().tolist(), again["run"]["epoch"]) == ([0, 1, 2], 4)
    assert Path(manager.save()).name == "ckpt-41"
    checkpoint = Checkpoint(w=variable(np.zeros(3)), run={"epoch": 0})
    CheckpointManager(checkpoint, str(tmp_path)).restore_or_initialize()
    assert checkpoint.assert_consumed().run == {"epoch": 4}


def test_maybe_save_every_few_steps(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path), every_steps=10)
    saved = [step for step in range(1, 36) if manager.maybe_save(step)]
    assert saved == [10, 20, 30]
    again = CheckpointManager({"n": 1}, str(tmp_path), every_steps=10)
    assert [step for step in range(31, 52) if again.maybe_save(step)] == [40, 50]
    assert CheckpointManager({"n": 1}, str(tmp_path)).maybe_save(1000) is None


def test_periodic_save_replaces_same_step(tmp_path: Path) -> None:
    with CheckpointManager({"n": 1}, str(tmp_path), every_s=0.01, every_steps=10) as manager:
        assert manager.maybe_save(7) is None
        serial = until(lambda: serial_of(tmp_path / "ckpt-7"))
        before = names(manager)
        until(lambda: serial_of(tmp_path / "ckpt-7") > serial + 2)
        assert names(manager) == before
        assert manager.maybe_save(8) is None


def test_periodic_save_after_restore_has_new_step(
    tmp_path: Path,
) -> None:
    with CheckpointManager({"n": 1}, str(tmp_path), every_s=0.05) as manager:
        manager.save(10)
        manager.maybe_save(20)
        restored = number(manager.restore_or_initialize() or "")
        serial = serial_of(tmp_path / "ckpt-20")
        until(lambda: serial_of(tmp_path / f"ckpt-{restored + 1}"))
        assert serial_of(tmp_path / "ckpt-20") == serial


def serial_of(checkpoint: Path) -> int:
    """Return the serial number of a checkpoint, 0 if it does not exist."""
    return next(
        (one.serial for path, one in checkpoints(checkpoint.parent) if path == str(checkpoint)), 0
    )


def test_periodic_save_ends_with_close(tmp_path: Path) -> None:
    with CheckpointManager({"n": 1}, str(tmp_path), every_s=0.01) as manager:
        manager.maybe_save(17)
        seen = next(checkpoints_iterator(str(tmp_path), timeout=PATIENCE_S))
    assert number(seen) >= 1
    assert not [thread for thread in threading.enumerate() if thread.name == "zmqdist-checkpoints"]
    after = manager.checkpoints
    assert [path for path in manager.checkpoints if path not in after] == []


def number(path: str) -> int:
    return int(path.rpartition("-")[2])


def test_periodic_error_is_raised_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "d"
    folder.touch()  # a file is in the way of the folder
    logged = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: logged.set()  # type: ignore[method-assign]
    logging.getLogger("zmqdist.checkpoint").addHandler(handler)
    try:
        manager = CheckpointManager({"n": 1}, str(folder), every_s=0.01)
        assert logged.wait(PATIENCE_S)
        folder.unlink()
        next(checkpoints_iterator(str(folder), timeout=PATIENCE_S))  # it goes on
        with pytest.raises(UnknownError, match="File exists"):
            manager.save()
        manager.save()
        manager.close()
    finally:
        logging.getLogger("zmqdist.checkpoint").removeHandler(handler)
    assert f"periodic checkpoint in {folder} failed; " in caplog.text


@pytest.mark.parametrize("wrong", [{"max_to_keep": 0}, {"every_s": -1.0}, {"every_steps": 0}])
def test_numbers_must_be_positive(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(wrong))} is .*, wants a positive number or None"
    ):
        CheckpointManager({"n": 1}, str(tmp_path), **wrong)


SAVING = """
import os, sys, numpy as np, zmqdist as zd
from tests.training.helpers import sharded
for _ in sys.stdin:  # each line asks for one more life of the program, forked, because importing NumPy takes longer than a life
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue
    print("pid", os.getpid(), flush=True)
    state = {"n": 0}
    emb = sharded(np.zeros((4, 1000)), 4)
    manager = zd.checkpoint.CheckpointManager({"state": state, "emb": emb}, sys.argv[1], max_to_keep=2)
    manager.restore_or_initialize()
    while True:
        state["n"] += 1
        emb.assign(np.full((4, 1000), float(state["n"])))
        manager.save(state["n"])
        print("saved", state["n"], flush=True)
"""


@pytest.mark.processes("checkpoint and recovery")
@pytest.mark.killed("checkpoint and recovery")
def test_kill_leaves_the_last_checkpoint(
    tmp_path: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    program = child(SAVING, str(tmp_path))
    assert program.stdin is not None
    assert program.stdout is not None
    last = 0
    for more in (3, 1, 4, 1, 5):
        program.stdin.write("live\n")
        program.stdin.flush()
        word, pid = program.stdout.readline().split()
        assert word == "pid"
        for _ in range(more):
            said = program.stdout.readline().split()
            assert said[:1] == ["saved"], program.stdout.read()
            assert int(said[1]) == last + 1
            last = int(said[1])
        os.kill(int(pid), signal.SIGKILL)
        while (line := program.stdout.readline()) != "ended\n":
            last = int(line.split()[1])
        path = latest_checkpoint(str(tmp_path))
        found = zd.checkpoint.load(path or "")
        assert found["state/n"] in (last, last + 1)  # killed between saving and saying so
        assert (found["emb"] == found["state/n"]).all()
        last = found["state/n"]
    CheckpointManager({"n": 1}, str(tmp_path), max_to_keep=2).save()
    assert len(list(tmp_path.iterdir())) == 2  # what was left unfinished is gone


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_the_former_checkpoint(
    tmp_path: Path, small_files: Callable[[int], None]
) -> None:
    w = variable(np.ones(100_000))
    manager = CheckpointManager({"w": w}, str(tmp_path), max_to_keep=1)
    manager.save()
    w.assign(np.zeros(100_000))
    small_files(4096)
    with pytest.raises(ResourceExhaustedError, match=r"ckpt-2.*00000-w.*File too large"):
        manager.save()
    small_files(resource.RLIM_INFINITY)
    assert names(manager) == ["ckpt-1"]
    assert len(list(tmp_path.iterdir())) == 1
    assert zd.checkpoint.load(manager.latest_checkpoint or "")["w"].all()


# -- checkpoints_iterator --------------------------------------------------------------------------


def test_evaluator_sees_each_checkpoint(tmp_path: Path) -> None:
    seen: list[int] = []
    got = threading.Semaphore(0)

    def evaluate() -> None:
        for path in checkpoints_iterator(str(tmp_path / "later")):
            seen.append(number(path))
            got.release()

    evaluator = threading.Thread(target=evaluate)
    evaluator.start()
    manager = CheckpointManager({"n": 1}, str(tmp_path / "later"))
    for step in (1, 2):
        manager.save(step)
        assert got.acquire(timeout=PATIENCE_S)
    manager.finish()
    evaluator.join(PATIENCE_S)
    assert not evaluator.is_alive()
    assert seen == [1, 2]


def test_late_evaluator_gets_the_last(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path))
    manager.save(1)
    manager.save(2)
    manager.finish()
    assert [number(path) for path in checkpoints_iterator(str(tmp_path))] == [2]


def test_resumed_training_removes_the_end_mark(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path))
    manager.save(1)
    manager.finish()
    manager.save(2)
    assert not (tmp_path / "FINISHED").exists()
    manager.finish()
    CheckpointManager({"n": 1}, str(tmp_path)).save(3)
    requests: list[bool] = []
    seen = list(
        checkpoints_iterator(
            str(tmp_path), timeout=0.0, timeout_fn=lambda: requests.append(True) or True
        )
    )
    assert ([number(path) for path in seen], requests) == ([3], [True])


def test_iterator_ends_after_its_timeout(
    tmp_path: Path,
) -> None:
    assert list(checkpoints_iterator(str(tmp_path / "none"), timeout=0.0)) == []
    manager = CheckpointManager({"n": 1}, str(tmp_path))
    requests: list[int] = []

    def over() -> bool:
        requests.append(len(requests))
        if len(requests) == 2:
            manager.save(9)
        return len(requests) == 4

    assert [
        number(path) for path in checkpoints_iterator(str(tmp_path), timeout=0.0, timeout_fn=over)
    ] == [9]
    assert len(requests) == 4


def test_deleted_checkpoint_is_not_found(tmp_path: Path) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path), max_to_keep=1)
    read, skipped = [], []
    manager.save(1)
    for path in checkpoints_iterator(str(tmp_path), timeout=0.0):
        if number(path) == 1:
            manager.save(2)
        try:
            zd.checkpoint.restore(path, {"n": 0})
            read.append(number(path))
        except OpError as error:
            skipped.append(error)
    assert read == [2]
    assert [type(error) for error in skipped] == [NotFoundError]


def test_checkpoint_deleted_while_read(tmp_path: Path) -> None:
    manager = CheckpointManager({"w": variable(np.ones(3))}, str(tmp_path), max_to_keep=1)
    reader = CheckpointReader(manager.save(1))
    manager.save(2)
    with pytest.raises(NotFoundError, match="was deleted while it was read"):
        reader.verify(["w"])
    with pytest.raises(NotFoundError, match="was deleted while it was read"):
        reader.whole("w")


def test_checkpoint_replaced_while_read(tmp_path: Path) -> None:
    w = variable(np.ones(3))
    reader = CheckpointReader(zd.checkpoint.save(str(tmp_path / "c"), {"w": w}))
    zd.checkpoint.save(str(tmp_path / "c"), {"w": w})
    with pytest.raises(NotFoundError, match="was replaced while it was read"):
        reader.whole("w")


def test_damaged_checkpoint_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path))
    manager.save(1)
    manager.save(2)
    (tmp_path / "ckpt-2" / "manifest.json").write_text("")
    assert names(manager) == ["ckpt-1"]
    assert "a checkpoint is skipped: " in caplog.text


@pytest.mark.parametrize("step", [np.int64(3), np.array(3), variable(np.int64(3))])
def test_step_may_be_numpy_or_variable(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path), every_steps=1)
    manager.save(step)
    assert names(manager) == ["ckpt-3"]
    assert CheckpointReader(manager.checkpoints[0]).manifest.step == 3
    assert manager.maybe_save(step) is None


@pytest.mark.parametrize("step", [-1, 1.5, "3", np.zeros(2, int)])
def test_bad_step_is_refused(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager({"n": 1}, str(tmp_path), every_steps=1)
    for save in (manager.save, manager.maybe_save):
        with pytest.raises((TypeError, ValueError)):
            save(step)
    with pytest.raises((TypeError, ValueError)):
        zd.checkpoint.save(str(tmp_path / "c"), {"n": 1}, step=step)
    assert not list(tmp_path.iterdir())


def test_file_as_directory_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "d").touch()
    with pytest.raises(UnknownError, match="/d: File exists"):
        CheckpointManager({"n": 1}, str(tmp_path / "d")).save()


def test_interval_counts_steps_of_the_counter(tmp_path: Path) -> None:
    step = zd.Variable(0)
    manager = CheckpointManager(
        {"n": step}, tmp_path, step_counter=step, checkpoint_interval=10, max_to_keep=9
    )
    saved = [manager.save() is not None and int(step) for _ in range(25) if step.assign_add(1)]
    assert [number for number in saved if number] == [10, 20]
    assert manager.save(check_interval=False) == manager.latest_checkpoint
    manager.save(checkpoint_number=99)
    assert names(manager) == ["ckpt-10", "ckpt-20", "ckpt-25", "ckpt-99"]


def test_init_fn_is_called_without_checkpoint(tmp_path: Path) -> None:
    calls: list[int] = []
    manager = CheckpointManager({"n": 1}, tmp_path, init_fn=lambda: calls.append(1))
    assert (manager.restore_or_initialize(), calls) == (None, [1])
    path = manager.save()
    assert (manager.restore_or_initialize(), calls) == (path, [1])


def test_latest_checkpoint_finds_other_names(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a", "c")):
        path = zd.checkpoint.save(tmp_path / name, {"n": 1})
        os.utime(Path(path, "manifest.json"), ns=(number % 2, number % 2))
    (tmp_path / "empty").mkdir()
    assert latest_checkpoint(tmp_path) == str(tmp_path / "a")
    path = CheckpointManager({"n": 1}, tmp_path).save()
    assert latest_checkpoint(tmp_path) == path


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"keep_checkpoint_every_n_hours": 1}, "keep_checkpoint_every_n_hours: max_to_keep alone"),
        ({"checkpoint_name": "model"}, "checkpoint_name: checkpoints are called ckpt-N"),
        ({"checkpoint_interval": 5}, "checkpoint_interval needs a step_counter"),
        (
            {"checkpoint_interval": 5, "step_counter": 1, "every_steps": 2},
            "and replaces every_steps",
        ),
        ({"checkpoint_interval": 0}, "checkpoint_interval is 0, wants a positive number or None"),
    ],
)
def test_argument_without_meaning_is_refused(tmp_path: Path, wrong: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CheckpointManager({"n": 1}, tmp_path, **wrong)
