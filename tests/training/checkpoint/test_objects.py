"""`Checkpoint`: attributes, saved together, also restored when they are made later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.training.helpers import sharded, variable
from zmqdist.checkpoint import Checkpoint

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def zeros() -> Any:
    return np.zeros((4, 3), np.float32)


@pytest.mark.parametrize("after", [2, 4])
def test_checkpoint_direct(tmp_path: Path, after: int) -> None:
    path = Checkpoint(s=sharded(ROWS, 2)).save(str(tmp_path / "c"))
    target = Checkpoint(s=sharded(zeros(), after))
    target.restore(path).assert_consumed()
    assert target.s.numpy().tolist() == ROWS.tolist()


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 4), (4, 2)])
def test_checkpoint_delayed(tmp_path: Path, before: int, after: int) -> None:
    path = Checkpoint(s=sharded(ROWS, before)).save(str(tmp_path / "c"))
    target = Checkpoint()
    target.restore(path)
    target.s = sharded(zeros(), after)
    assert target.s.numpy().tolist() == ROWS.tolist()
    target.assert_consumed()


def test_nested_objects_are_restored_later_too(tmp_path: Path) -> None:
    model = Checkpoint(w=variable(ROWS), layers=[Checkpoint(b=variable(np.float32(2)))])
    path = Checkpoint(model=model, epoch=5, run={"seed": 3}).save(str(tmp_path / "c"))

    later = Checkpoint(epoch=0)
    later.restore(path)
    assert later.epoch == 5
    later.model = Checkpoint()
    later.model.w = variable(zeros())
    assert later.model.w.numpy().tolist() == ROWS.tolist()
    later.model.layers = [Checkpoint()]
    later.model.layers[0].b = variable(np.float32(0))
    assert later.model.layers[0].b.numpy() == 2
    with pytest.raises(AssertionError, match="restored to no attribute: run/seed"):
        later.assert_consumed()
    later.run = {"seed": 0}
    assert later.run == {"seed": 3}
    later.assert_consumed()


def test_number_is_restored_once(tmp_path: Path) -> None:
    path = Checkpoint(epoch=5).save(str(tmp_path / "c"))
    target = Checkpoint(epoch=0).restore(path)
    target.epoch += 1
    assert target.epoch == 6
    target.restore(path)
    assert target.epoch == 5


def test_model_class_may_be_a_checkpoint(tmp_path: Path) -> None:
    class Model(Checkpoint):
        def __init__(self) -> None:
            self.w = variable(ROWS)
            self._cache = object()  # not saved

    path = Model().save(str(tmp_path / "c"))
    assert sorted(zd.checkpoint.load(path)) == ["w"]


def test_unfit_attribute_is_refused(tmp_path: Path) -> None:
    path = Checkpoint(w=variable(ROWS)).save(str(tmp_path / "c"))
    target = Checkpoint().restore(path)
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\)"):
        target.w = variable(np.zeros(2, np.float32))
    assert not hasattr(target, "w")


def test_missing_attribute_is_named(tmp_path: Path) -> None:
    path = Checkpoint(w=variable(ROWS)).save(str(tmp_path / "c"))
    target = Checkpoint(w=variable(zeros()), bias=variable(zeros()), epoch=1).restore(path)
    assert target.w.numpy().tolist() == ROWS.tolist()
    with pytest.raises(AssertionError, match=r"not restored from .*/c: bias, epoch"):
        target.assert_existing_objects_matched()


def test_empty_restore_fails_only_when_asserted() -> None:
    target = Checkpoint(epoch=1).restore(None)
    assert target.epoch == 1
    with pytest.raises(AssertionError, match="no checkpoint was given"):
        target.assert_consumed()


def test_items_of_root_are_saved_beside_attributes(tmp_path: Path) -> None:
    model = {"w": np.ones(2), "epoch": 3}
    path = Checkpoint(model, rate=0.5).write(tmp_path / "c")
    assert sorted(zd.checkpoint.load(path)) == ["epoch", "rate", "w"]
    other = {"w": np.zeros(2), "epoch": 0}
    restored = Checkpoint(other, rate=0.0).read(path).assert_consumed().expect_partial()
    assert (other["w"].tolist(), other["epoch"], restored.rate) == ([1, 1], 3, 0.5)


def test_checkpoint_in_root_is_restored_later_too(tmp_path: Path) -> None:
    path = Checkpoint(Checkpoint(epoch=3)).save(tmp_path / "c")
    model = Checkpoint()
    Checkpoint(root=model).restore(path)
    model.epoch = 0
    assert model.epoch == 3


def test_restore_of_other_names_is_trivial(tmp_path: Path) -> None:
    path = Checkpoint(a=1).save(tmp_path / "c")
    with pytest.raises(AssertionError, match="nothing was restored from"):
        Checkpoint(b=1).restore(path).assert_nontrivial_match()
    Checkpoint(a=0).restore(path).assert_nontrivial_match()


@pytest.mark.parametrize("method", ["save", "write", "restore", "read"])
def test_options_of_tensorflow_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match="options: a checkpoint is written in one way only"):
        getattr(Checkpoint(a=1), method)(tmp_path / "c", options="fast")
