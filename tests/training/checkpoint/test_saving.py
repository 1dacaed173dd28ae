"""`save`, `restore` and `load`; those whose names say so are the bullets of TensorFlow's
sharded_variable_test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zmqdist as zd
from tests.training.helpers import set_slots, sharded, slots_of, variable
from zmqdist.training.checkpoint.manifest import Manifest


def rows(count: int, width: int = 3) -> Any:
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def test_save_restore(tmp_path: Path) -> None:
    s = sharded(rows(4), 4)
    path = zd.checkpoint.save(str(tmp_path / "c"), {"s": s})
    assert path == str(tmp_path / "c")
    s.assign(np.zeros((4, 3), np.float32))
    zd.checkpoint.restore(path, {"s": s})
    assert s.numpy().tolist() == rows(4).tolist()
    assert [each.numpy().tolist() for each in s.variables] == [[row] for row in rows(4).tolist()]


@pytest.mark.parametrize(
    ("count", "before", "after"),
    [
        (4, 4, 1),
        (4, 1, 4),
        (4, 4, 2),
        (4, 2, 4),
        (7, 3, 2),
        (7, 2, 3),
        (13, 5, 4),
        (5, 5, 5),
        (3, 1, 1),
    ],
)
def test_save_and_restore_with_different_partitions(
    tmp_path: Path, count: int, before: int, after: int
) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), {"s": sharded(rows(count), before)})
    target = sharded(np.zeros((count, 3), np.float32), after)
    zd.checkpoint.restore(path, {"s": target})
    assert target.numpy().tolist() == rows(count).tolist()
    assert Manifest.read(path).entries["s"].shape == (count, 3)


def test_different_partitions_4_to_1_to_4(tmp_path: Path) -> None:
    first, one, last = (
        sharded(rows(4), 4),
        variable(np.zeros((4, 3), np.float32)),
        sharded(0 * rows(4), 4),
    )
    zd.checkpoint.restore(zd.checkpoint.save(str(tmp_path / "a"), {"s": first}), {"s": one})
    assert one.numpy().tolist() == rows(4).tolist()
    zd.checkpoint.restore(zd.checkpoint.save(str(tmp_path / "b"), {"s": one}), {"s": last})
    assert [each.numpy().tolist() for each in last.variables] == [[row] for row in rows(4).tolist()]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2), (2, 1), (1, 1), (1, 2)])
def test_save_and_load_single_variable(tmp_path: Path, before: int, after: int) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), sharded(rows(6), before))
    assert zd.checkpoint.load(path)["v"].tolist() == rows(6).tolist()
    target = sharded(0 * rows(6), after)
    zd.checkpoint.restore(path, target)
    assert target.numpy().tolist() == rows(6).tolist()


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4), (3, 2), (1, 3), (3, 1)])
def test_slots_are_cut_with_their_variable(tmp_path: Path, before: int, after: int) -> None:
    source, target = sharded(rows(7), before), sharded(0 * rows(7), after)
    moments = -rows(7)
    start = 0
    for each in source.variables:
        stop = start + each.shape[0]
        set_slots(
            each,
            Adam__m=moments[start:stop],
            Adam__v=moments[start:stop] ** 2,
            Adam__step=np.int64(12),
        )
        start = stop
    zd.checkpoint.restore(zd.checkpoint.save(str(tmp_path / "c"), {"s": source}), {"s": target})
    slots = [slots_of(each) for each in target.variables]
    assert np.concatenate([each["Adam/m"] for each in slots]).tolist() == moments.tolist()
    assert np.concatenate([each["Adam/v"] for each in slots]).tolist() == (moments**2).tolist()
    assert [int(each["Adam/step"]) for each in slots] == [12] * after


def test_missing_slot_has_its_initial_value(tmp_path: Path) -> None:
    source, target = sharded(rows(4), 2), variable(0 * rows(4))
    set_slots(
        source.variables[1],
        Adagrad__accumulator=np.full((2, 3), 5.0, np.float32),
        Adagrad__step=np.int64(3),
    )
    zd.checkpoint.restore(zd.checkpoint.save(str(tmp_path / "c"), {"s": source}), {"s": target})
    initial = zd.optimizers.Adagrad().slot_values["accumulator"]
    assert (
        slots_of(target)["Adagrad/accumulator"].tolist()
        == np.float32([[initial] * 3] * 2 + [[5.0] * 3] * 2).tolist()
    )
    assert slots_of(target)["Adagrad/step"] == 3


def test_step_count_is_the_highest_of_shards(
    tmp_path: Path,
) -> None:
    source, target = sharded(rows(4), 2), variable(0 * rows(4))
    for each, step in zip(source.variables, (9, 4), strict=True):
        set_slots(each, Adam__m=np.zeros((2, 3), np.float32), Adam__step=np.int64(step))
    zd.checkpoint.restore(zd.checkpoint.save(str(tmp_path / "c"), {"s": source}), {"s": target})
    assert slots_of(target)["Adam/step"] == 9


def test_restore_removes_later_slots(tmp_path: Path) -> None:
    v = variable(rows(2))
    path = zd.checkpoint.save(str(tmp_path / "c"), v)
    set_slots(v, Adam__m=rows(2), Adam__step=np.int64(1))
    zd.checkpoint.restore(path, v)
    assert slots_of(v) == {}


def test_plain_values_come_back(tmp_path: Path) -> None:
    counts = np.arange(4)
    state: dict[str, Any] = {
        "w": variable(rows(2)),
        "counts": counts,
        "run": {
            "epoch": 3,
            "rate": 0.5,
            "name": "first",
            "best": None,
            "done": False,
            "losses": [0.5, 0.25],
        },
        "precise": np.float32(1.5),
    }
    path = zd.checkpoint.save(str(tmp_path / "c"), state)
    counts += 100
    state["run"].update(epoch=0, rate=1.0, name="", best=7, done=True, losses=[0.0, 0.0])
    state["precise"] = np.float32(0)
    zd.checkpoint.restore(path, state)
    assert counts.tolist() == [0, 1, 2, 3]
    run = {
        "epoch": 3,
        "rate": 0.5,
        "name": "first",
        "best": None,
        "done": False,
        "losses": [0.5, 0.25],
    }
    assert state["run"] == run
    assert type(state["run"]["epoch"]) is int
    assert type(state["precise"]) is np.float32
    assert state["precise"] == 1.5


@pytest.mark.parametrize(
    "value",
    [
        np.float64(3.5),
        np.zeros((0, 3), np.int16),
        np.array(["a", "bcd"]),
        np.array([b"x"]),
        np.array(["2024-01-01"], "M8[D]"),
        np.array([1 + 2j], np.complex64),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
        np.zeros(2, np.dtype({"names": ["a", "b"], "formats": ["<i4", "<f4"], "offsets": [0, 0]})),
        np.zeros(2, np.dtype((np.record, [("a", "i4")]))),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(True),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_arrays_come_back_bit_for_bit(tmp_path: Path, value: Any) -> None:
    for kind, given in (("array", value), ("variable", variable(value))):
        path = zd.checkpoint.save(str(tmp_path / kind), {"x": given})
        found = zd.checkpoint.load(path)["x"]
        assert (repr(found.dtype), found.shape, found.tobytes()) == (
            repr(value.dtype),
            value.shape,
            value.tobytes(),
        )


def test_aligned_fields_come_back(tmp_path: Path) -> None:
    value = np.ones(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    found = zd.checkpoint.load(zd.checkpoint.save(str(tmp_path / "c"), {"x": value}))["x"]
    assert repr(found.dtype) == repr(value.dtype)
    assert np.array_equal(found, value)


def test_bfloat16_variable_comes_back(tmp_path: Path) -> None:
    value = np.array([[1, 2.5]], pytest.importorskip("ml_dtypes").bfloat16)
    found = zd.checkpoint.load(zd.checkpoint.save(str(tmp_path / "c"), {"x": variable(value)}))["x"]
    assert (found.dtype, found.tobytes()) == (value.dtype, value.tobytes())


def test_names_are_paths_to_leaves(
    tmp_path: Path,
) -> None:
    w, b = variable(rows(1), "dense/w"), variable(np.float32(0), "dense/b")
    zd.checkpoint.save(str(tmp_path / "list"), [w, b])
    zd.checkpoint.save(str(tmp_path / "nested"), {"model": [w, {"b": b}], 7: (1, 2)})
    assert Manifest.read(str(tmp_path / "list")).names == ["dense/b", "dense/w"]
    assert Manifest.read(str(tmp_path / "nested")).names == [
        "7/0",
        "7/1",
        "model/1/b",
        "model/dense/w",
    ]


def test_shard_is_one_file_without_pickle(tmp_path: Path) -> None:
    s = sharded(rows(4), 2)
    set_slots(s.variables[0], Momentum__velocity=rows(2))
    path = Path(zd.checkpoint.save(str(tmp_path / "c"), {"emb": s}))
    files = sorted(file for file in path.iterdir() if file.suffix == ".npz")
    assert [file.name.split(".")[0] for file in files] == [
        "00000-emb-00000-of-00002",
        "00000-emb-00001-of-00002",
    ]
    with np.load(files[0], allow_pickle=False) as arrays:
        assert sorted(arrays) == ["slot:Momentum/step", "slot:Momentum/velocity", "value"]
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [*(file.name for file in files), "manifest.json"]
    )


def test_save_replaces_a_checkpoint(tmp_path: Path) -> None:
    v = variable(rows(2))
    path = Path(zd.checkpoint.save(str(tmp_path / "c"), v))
    v.assign(rows(2) + 1)
    zd.checkpoint.save(str(path), v)
    assert zd.checkpoint.load(str(path))["v"].tolist() == (rows(2) + 1).tolist()
    assert len(list(path.iterdir())) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_strict_false_restores_common_names(tmp_path: Path) -> None:
    w, x = variable(rows(1), "w"), variable(rows(1), "x")
    path = zd.checkpoint.save(str(tmp_path / "c"), {"w": w, "epoch": 3})
    w.assign(0 * rows(1))
    zd.checkpoint.restore(path, {"w": w, "x": x}, strict=False)
    assert w.numpy().tolist() == rows(1).tolist()
    with pytest.raises(ValueError, match="holds 'epoch', 'w', and none of 'x'"):
        zd.checkpoint.restore(path, {"x": x}, strict=False)


def test_chosen_names_are_loaded(tmp_path: Path) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), {"w": variable(rows(1)), "epoch": 3})
    assert zd.checkpoint.load(path, ["epoch"]) == {"epoch": 3}
    with pytest.raises(KeyError, match="does not hold 'x'; it holds 'epoch', 'w'"):
        zd.checkpoint.load(path, ["x"])


def test_checkpoint_is_read_without_cluster(tmp_path: Path) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), {"s": sharded(rows(4), 3)})
    program = "import sys, zmqdist; print(zmqdist.checkpoint.load(sys.argv[1])['s'].sum(), 'zmq' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, path],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.split()[0] == str(rows(4).sum())


def test_url_is_written_in_place(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    url = "memory://test_a_url/c"
    for add in (0, 1):
        zd.checkpoint.save(url, {"s": sharded(rows(4) + add, 2)})
        assert zd.checkpoint.load(url)["s"].tolist() == (rows(4) + add).tolist()


WRONG_MODEL = {
    "another shape": (
        {"w": np.zeros((2, 4), np.float32)},
        r"'w' has shape \(2, 4\) and dtype float32.*shape \(2, 3\)",
    ),
    "another dtype": (
        {"w": np.zeros((2, 3))},
        r"'w' has shape \(2, 3\) and dtype float64.*dtype float32",
    ),
    "more rows": ({"w": np.zeros((3, 3), np.float32)}, r"'w' has shape \(3, 3\).*\(2, 3\)"),
    "a scalar": ({"w": np.float32(1)}, r"'w' has shape \(\).*\(2, 3\)"),
    "a name that is not there": ({"w": rows(2), "x": rows(2)}, "it lacks 'x'"),
}


@pytest.mark.parametrize(("given", "message"), WRONG_MODEL.values(), ids=WRONG_MODEL)
@pytest.mark.parametrize("shards", [1, 2])
def test_checkpoint_of_other_model_is_refused(
    tmp_path: Path, given: dict[str, Any], message: str, shards: int
) -> None:
    path = zd.checkpoint.save(
        str(tmp_path / "c"), {"a": variable(rows(1), "a"), "w": sharded(rows(2), 2, "w")}
    )
    a = variable(7 + rows(1), "a")
    target: dict[str, Any] = {"a": a}
    for name, value in given.items():
        target[name] = sharded(value, shards, name) if np.shape(value) else variable(value, name)
    with pytest.raises(ValueError, match=message):
        zd.checkpoint.restore(path, target)
    assert a.numpy().tolist() == (7 + rows(1)).tolist()


def test_extra_entry_is_refused(tmp_path: Path) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), {"w": variable(rows(1)), "epoch": 3})
    with pytest.raises(
        ValueError,
        match=r"it also holds 'epoch' \(strict=False restores the names that both have\)",
    ):
        zd.checkpoint.restore(path, {"w": variable(rows(1))})


BAD_TO_SAVE: dict[str, tuple[Any, type[Exception], str]] = {
    "an object": ({"x": object()}, TypeError, "x: object cannot be saved"),
    "an optimizer": (
        {"opt": {"x": zip}},
        TypeError,
        "opt/x: type cannot be saved.*with their variables",
    ),
    "an array of objects": (
        {"x": np.array([{}])},
        TypeError,
        "x: dtype object holds Python objects",
    ),
    "a masked array": (
        {"x": np.ma.masked_array([1.0])},
        TypeError,
        r"x: a numpy\.ma\.MaskedArray .* array\.filled",
    ),
    "metadata": (
        {"x": np.zeros(1, np.dtype("i4", metadata={"a": 1}))},
        TypeError,
        "x: dtype int32 has metadata",
    ),
    "a number alone": (
        3,
        TypeError,
        "a variable, a dict, a list or a Checkpoint can be saved, not int",
    ),
    "nothing": (None, TypeError, "not NoneType"),
    "a key that is no name": (
        {(1, 2): 3},
        TypeError,
        r"keys .* strings or whole numbers, not \(1, 2\)",
    ),
    "one name twice": (
        {"a": {"b": 1}, "a/b": 2},
        ValueError,
        "two items to be saved are called 'a/b'",
    ),
}


@pytest.mark.parametrize(("given", "kind", "message"), BAD_TO_SAVE.values(), ids=BAD_TO_SAVE)
def test_unsavable_value_is_refused_first(
    tmp_path: Path, given: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        zd.checkpoint.save(str(tmp_path / "c"), given)
    assert not list(tmp_path.iterdir())


def test_equal_names_in_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two items to be saved are called 'v'"):
        zd.checkpoint.save(str(tmp_path / "c"), [variable(1.0), variable(2.0)])


BAD_TO_RESTORE: dict[str, tuple[Any, type[Exception], str]] = {
    "a string for a number": ({"n": "x"}, ValueError, "'n' is 'x', and in checkpoint .* it is 3"),
    "an array for a number": ({"n": np.zeros(2)}, ValueError, r"'n' has shape \(2,\).* it is 3"),
    "a bool for a number": ({"n": True}, ValueError, "'n' is True, .* it is 3"),
}


@pytest.mark.parametrize(("given", "kind", "message"), BAD_TO_RESTORE.values(), ids=BAD_TO_RESTORE)
def test_value_of_other_kind_is_refused(
    tmp_path: Path, given: Any, kind: type[Exception], message: str
) -> None:
    path = zd.checkpoint.save(str(tmp_path / "c"), {"n": 3})
    with pytest.raises(kind, match=message):
        zd.checkpoint.restore(path, given)


def test_tuple_and_read_only_array_are_refused(tmp_path: Path) -> None:
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    path = zd.checkpoint.save(str(tmp_path / "c"), {"t": (1, 2)})
    with pytest.raises(TypeError, match="'t/0' is in a tuple"):
        zd.checkpoint.restore(path, {"t": (1, 2)})
    path = zd.checkpoint.save(str(tmp_path / "d"), {"a": fixed})
    with pytest.raises(ValueError, match="'a' is a read-only array"):
        zd.checkpoint.restore(path, {"a": fixed})


def test_foreign_files_in_folder_stay(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", a=1)
    for _ in range(2):
        zd.checkpoint.save(tmp_path, {"w": variable(np.ones(3))})
    assert np.load(tmp_path / "mine.npz")["a"] == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_paths_may_be_objects(tmp_path: Path) -> None:
    path = zd.checkpoint.save(tmp_path / "c", {"n": 1})
    assert path == str(tmp_path / "c")
    assert zd.checkpoint.load(tmp_path / "c") == {"n": 1}
    zd.checkpoint.restore(tmp_path / "c", {"n": 2})
    zd.checkpoint.Checkpoint(n=2).restore(tmp_path / "c").assert_consumed()
    manager = zd.checkpoint.CheckpointManager({"n": 1}, tmp_path / "d")
    assert manager.save() == zd.checkpoint.latest_checkpoint(tmp_path / "d")
    assert next(zd.checkpoint.checkpoints_iterator(tmp_path / "d")) == manager.latest_checkpoint
