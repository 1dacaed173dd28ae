"""Values at a ps: reading, changing, and what is refused."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from tests.helpers import internal_client_with
from tests.variables.conftest import SESSION, Make
from zmqdist.errors import InvalidArgumentError, PSUnavailableError, UnknownError
from zmqdist.optimizers import SGD, Adam
from zmqdist.specs import IndexedSlices, TensorSpec
from zmqdist.tasks.server import Server
from zmqdist.variables import client as c
from zmqdist.variables.client import PsClient, Ref, UpdateOutcome
from zmqdist.variables.hosted_variable import HostedVariable
from zmqdist.variables.variable_host import is_small

LARGE = (1 << 17, 4)  # 2 MiB: more than a message holds


def value_of(client: PsClient, ref: Ref) -> Any:
    ((_, value),) = client.read([ref]).get_value()
    return value


def one(client: PsClient, ref: Ref, change: c.Change, **how: Any) -> UpdateOutcome:
    (outcome,) = client.update([(ref, change)], **how).get_value()
    assert isinstance(outcome, UpdateOutcome)
    return outcome


def test_additions_change_value_and_version(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    assert one(client, ref, c.add(ref, [10, 20])) == (2, True, None)
    assert one(client, ref, c.sub(ref, [1, 1])).version == 3
    assert client.read([ref]).get_value()[0][0] == 3
    assert value_of(client, ref).tolist() == [10, 21]
    outcome = one(client, ref, c.assign(ref, [5, 6]), want=True)
    assert outcome.value is not None
    assert (outcome.version, outcome.value.tolist()) == (4, [5, 6])


def test_initial_values_of_all_kinds(ps: Server, client: PsClient) -> None:
    spec = TensorSpec((2, 2), np.int64)
    refs = [
        Ref(f"v{number}", (2, 2), np.dtype(np.int64), ps.task, ps.address, SESSION, number)
        for number in range(3)
    ]

    def corner(shape: tuple[int, ...], offset: tuple[int, ...]) -> Any:
        return np.full(shape, offset[0])

    initials = [
        np.eye(2, dtype=np.int64),
        spec,
        c.initializer(corner, spec, shape=(2, 2), offset=(7, 0)),
    ]
    for ref, initial in zip(refs, initials, strict=True):
        assert client.create(ref, initial).get_value() == spec
    read = [value.tolist() for _, value in client.read(refs).get_value()]
    assert read == [[[1, 0], [0, 1]], [[0, 0], [0, 0]], [[7, 7], [7, 7]]]


def test_second_create_finds_the_first(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    client.create(ref, np.zeros(2, "f4")).get_value()
    assert value_of(client, ref).tolist() == [1, 2]


@pytest.mark.parametrize(
    "fn", [lambda: np.zeros(3, "f4"), lambda: 1 / 0, lambda: np.zeros(2, "c16")]
)
def test_bad_initializer_names_the_variable(fn: Any, ps: Server, client: PsClient) -> None:
    ref = Ref("w", (2,), np.dtype("f4"), ps.task, ps.address, SESSION, 0)
    with pytest.raises(
        (UnknownError, InvalidArgumentError), match="initializer of variable 'w' on ps:0"
    ):
        client.create(ref, c.initializer(fn, TensorSpec((2,), "f4"))).get_value()


@pytest.mark.parametrize("shape", [(4, 4), LARGE])
def test_read_value_never_changes(shape: tuple[int, ...], client: PsClient, make: Make) -> None:
    ref = make(np.zeros(shape))
    changes = [
        c.add(ref, np.ones(shape, "f4")),
        c.scatter(ref, "add", IndexedSlices(np.ones((2, 4), "f4"), np.array([0, 3]))),
        c.apply(ref, SGD(1.0), np.ones(shape, "f4")),
        c.apply(ref, Adam(1.0), IndexedSlices(np.ones((1, 4), "f4"), np.array([0]))),
        c.assign(ref, np.full(shape, 9, "f4")),
    ]
    seen = []
    for change in changes:
        value = value_of(client, ref)
        seen.append((value, value.copy()))
        one(client, ref, change)
    for value, copy in seen:
        np.testing.assert_array_equal(value, copy)
    assert value_of(client, ref)[0, 0] == 9


def test_rows_keep_the_requested_order(client: PsClient, make: Make) -> None:
    first, second = make(np.arange(12).reshape(6, 2)), make(np.arange(3), name="v")
    rows, flat = client.rows([(first, [5, 0, 5]), (second, np.array([2, 1]))]).get_value()
    assert rows.tolist() == [[10, 11], [0, 1], [10, 11]]
    assert flat.tolist() == [2, 1]
    assert client.rows([(first, [])]).get_value()[0].shape == (0, 2)


def test_range_of_rows_by_its_bounds(client: PsClient, make: Make) -> None:
    ref = make(np.arange(100_000))
    for rows in (range(10, 13), range(0, 100_000, 33_333), range(5, 5), range(99_999, 100_000)):
        (found,) = client.rows([(ref, rows)]).get_value()
        assert found.tolist() == list(rows)


@pytest.mark.parametrize("dtype", ["f4", "i4"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "min", "max", "update"])
def test_sparse_updates_agree_with_numpy(op: str, dtype: str, client: PsClient, make: Make) -> None:
    start = np.arange(1, 13).reshape(6, 2) * 6
    ref = make(start, dtype)
    indices = np.array([4, 0, 4, 2])
    rows = np.array([[2, 3], [4, 5], [6, 7], [1, 90]], dtype)
    expected = start.astype(dtype)
    for index, row in zip(indices, rows, strict=True):
        old = expected[index]
        expected[index] = {
            "add": old + row,
            "sub": old - row,
            "mul": old * row,
            "div": np.trunc(old / row) if dtype == "i4" else old / row,
            "min": np.minimum(old, row),
            "max": np.maximum(old, row),
            "update": row,
        }[op]
    one(client, ref, c.scatter(ref, op, IndexedSlices(rows, indices)))
    np.testing.assert_allclose(value_of(client, ref), expected, rtol=1e-6)


def test_swap_needs_version_or_value(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    assert one(client, ref, c.swap(ref, [3, 4], version=2)) == (1, False, None)
    assert one(client, ref, c.swap(ref, [3, 4], version=1)) == (2, True, None)
    assert not one(client, ref, c.swap(ref, [5, 6], expected=[1, 2])).applied
    assert one(client, ref, c.swap(ref, [5, 6], expected=[3, 4])).applied
    assert value_of(client, ref).tolist() == [5, 6]


@pytest.mark.parametrize(
    ("make_change", "text"),
    [
        (lambda ref: c.assign(ref, [1, 2, 3]), r"has shape \(2,\)"),
        (lambda ref: c.assign(ref, np.array([1j, 2j])), "complex128"),
        (lambda ref: c.assign(ref, ["a", "b"]), "which cannot hold <U1"),
        (lambda ref: c.add(ref, 1.0), r"a value of shape \(\) does not fit"),
        (lambda ref: ("add", np.ones(3, "f4")), r"given float32 of shape \(3,\)"),
        (lambda ref: ("assign", np.ones(2)), "given float64"),
        (lambda ref: ("nothing", 1), "there is no update 'nothing'"),
        (lambda ref: ("assign",), "update 'assign'"),
        (lambda ref: ("scatter", "pow", [0], np.ones(1, "f4")), "no sparse update 'pow'"),
        (
            lambda ref: c.scatter(ref, "add", IndexedSlices([1.0], [2])),
            "index 2 is out of range: the variable has rows 0 to 1",
        ),
        (lambda ref: c.scatter(ref, "add", IndexedSlices([1.0], [-1])), "index -1 is out of range"),
        (
            lambda ref: ("scatter", "add", np.zeros((1, 1), int), np.ones(1, "f4")),
            "in one dimension",
        ),
        (
            lambda ref: ("scatter", "add", np.array([0]), np.ones((1, 2), "f4")),
            "1 rows are float32",
        ),
        (lambda ref: ("apply", "Best", {}, np.ones(2, "f4")), "no optimizer 'Best'"),
        (lambda ref: c.apply(ref, SGD(1.0), IndexedSlices([1.0], [9])), "index 9 is out of range"),
    ],
)
def test_unfit_value_changes_nothing(
    make_change: Any, text: str, client: PsClient, make: Make
) -> None:
    ref, other = make([1, 2]), make([3, 4], name="other")
    with pytest.raises(InvalidArgumentError, match="variable 'w' on ps:0.*" + text):
        client.update([(other, c.add(other, [1, 1])), (ref, make_change(ref))]).get_value()
    assert [
        (version, value.tolist()) for version, value in client.read([ref, other]).get_value()
    ] == [
        (1, [1, 2]),
        (1, [3, 4]),
    ]


def test_rows_out_of_range_name_the_variable(client: PsClient, make: Make) -> None:
    ref, scalar = make([1, 2]), make(1)
    for wanted, text in (
        ((ref, [2]), "index 2"),
        ((ref, [[0]]), "one dimension"),
        ((scalar, [0]), "is a scalar"),
        ((ref, range(1, 3)), "rows 0 to 1"),
        ((ref, range(-1, 1)), "rows 0 to 1"),
        ((ref, range(1, -1, -1)), "rows 0 to 1"),
        ((scalar, range(1)), "is a scalar"),
    ):
        with pytest.raises(InvalidArgumentError, match="variable 'w' on ps:0.*" + text):
            client.rows([wanted]).get_value()


def test_update_changes_each_variable_once(client: PsClient, make: Make) -> None:
    first, second = make([1, 2]), make([3, 4])
    message = client.update(
        [(first, c.add(first, [1, 1])), (second, c.assign(second, [0, 0]))], want=True
    ).get_value()
    assert [outcome.value.tolist() for outcome in message] == [[2, 3], [0, 0]]
    with pytest.raises(InvalidArgumentError, match="names a variable twice"):
        client.update([(first, c.add(first, [1, 1])), (first, c.add(first, [1, 1]))]).get_value()


def test_additions_of_many_threads_count(client: PsClient, make: Make) -> None:
    small, large = make(np.zeros(2)), make(np.zeros(LARGE))
    threads = [
        threading.Thread(
            target=lambda: [
                client.update([(ref, c.add(ref, np.ones(ref.shape, "f4")))]).get_value()
                for _ in range(5)
                for ref in (small, large)
            ]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value_of(client, small).tolist() == [20, 20]
    assert (value_of(client, large) == 20).all()


# -- functions of users ----------------------------------------------------------------------------


def test_function_runs_at_the_ps_with_slots(client: PsClient, make: Make) -> None:
    def heavy(value: Any, gradient: Any, slots: dict[str, Any], step: int) -> None:
        slots["sum"] = slots.get("sum", np.zeros_like(value)) + gradient
        value -= slots["sum"] * step

    def fresh(value: Any, gradient: Any, slots: dict[str, Any], step: int) -> Any:
        return value * 2 + gradient

    ref = make([10, 20])
    one(client, ref, c.apply(ref, heavy, [1, 1]))
    one(client, ref, c.apply(ref, heavy, [1, 1]))
    assert value_of(client, ref).tolist() == [5, 15]
    one(client, ref, c.apply(ref, fresh, [1, 1]))
    assert value_of(client, ref).tolist() == [11, 31]


def test_function_is_sent_once(
    client: PsClient, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = make([1, 2])

    def double(value: Any, gradient: Any, slots: dict[str, Any], step: int) -> None:
        value *= 2

    sent = []
    start = c.internal_client.start

    def counting(rpc: Any, method: str, *args: Any, **how: Any) -> Any:
        sent.extend([method] if method.endswith(".function") else [])
        return start(rpc, method, *args, **how)

    monkeypatch.setattr(c, "internal_client", internal_client_with(start=counting))
    for _ in range(3):
        one(client, ref, c.apply(ref, double, [0, 0]))
    assert len(sent) == 1
    assert value_of(client, ref).tolist() == [8, 16]


def test_failed_function_changes_nothing(client: PsClient, make: Make) -> None:
    def broken(value: Any, gradient: Any, slots: dict[str, Any], step: int) -> None:
        value += 1
        slots["m"] = value
        raise KeyError("missing")

    ref = make([1, 2])
    with pytest.raises(
        UnknownError,
        match=r"variable 'w' on ps:0: update function .*broken raised KeyError: 'missing'",
    ):
        one(client, ref, c.apply(ref, broken, [0, 0]))
    ((version, value, slots, _),) = client.saved([ref]).get_value()
    assert (version, value.tolist(), slots) == (1, [1, 2], {})


def test_result_of_function_must_fit(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    with pytest.raises(InvalidArgumentError, match=r"returned float32 of shape \(3,\)"):
        one(client, ref, c.apply(ref, lambda value, gradient, slots, step: np.ones(3), [0, 0]))
    ref = make([1, 2], "i1")
    with pytest.raises(
        InvalidArgumentError,
        match=r"what update function .* returned is of int8, which cannot hold 300",
    ):
        one(
            client,
            ref,
            c.apply(ref, lambda value, gradient, slots, step: np.array([1, 300]), [0, 0]),
        )


# -- optimizers, saving ----------------------------------------------------------------------------


def test_slots_can_be_saved_and_restored(client: PsClient, make: Make) -> None:
    ref, other = make([1, 2]), make([0, 0])
    adam = Adam(0.1)
    one(client, ref, c.apply(ref, adam, [1, -1]))
    ((_, value, slots, _),) = client.saved([ref]).get_value()
    assert sorted(slots) == ["Adam/m", "Adam/step", "Adam/v"]
    one(client, other, c.restore(other, value, slots))
    outcomes = [one(client, each, c.apply(each, adam, [1, -1]), want=True) for each in (ref, other)]
    assert outcomes[0].value is not None
    assert outcomes[1].value is not None
    assert outcomes[0].value.tolist() == outcomes[1].value.tolist()


def test_lost_variable_is_made_anew(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    adam = Adam(0.1)
    one(client, ref, c.apply(ref, adam, [1, -1]))
    ((version, value, slots, _),) = client.saved([ref]).get_value()
    client.drop([ref]).get_value()
    client.create(ref, value, (version, slots, b"")).get_value()
    ((found, again, beside, _),) = client.saved([ref]).get_value()
    assert (found, again.tolist()) == (version, value.tolist())
    assert {name: slot.tolist() for name, slot in beside.items()} == {
        name: s.tolist() for name, s in slots.items()
    }


def test_optimizers_need_floats(client: PsClient, make: Make) -> None:
    ref = make([1, 2], "i4")
    with pytest.raises(
        InvalidArgumentError, match="Adam needs a variable of floats, and this one is int32"
    ):
        one(client, ref, c.apply(ref, Adam(), [1, 1]))


def test_text_has_no_arithmetic(client: PsClient, make: Make) -> None:
    ref = make(["a", "b"], "U5")
    one(client, ref, c.assign(ref, np.array(["c", "d"], "U5")))
    assert value_of(client, ref).tolist() == ["c", "d"]
    with pytest.raises(InvalidArgumentError, match="has no arithmetic"):
        one(client, ref, c.add(ref, np.array(["c", "d"], "U5")))


# -- sessions --------------------------------------------------------------------------------------


def test_dropped_variable_is_lost(client: PsClient, make: Make) -> None:
    client.open(8, 2)
    ref, kept, other = make([1, 2]), make([3, 4], name="kept"), make([5, 6], session=2)
    client.drop([ref]).get_value()
    client.close_session(2).get_value()
    for lost in (ref, other):
        with pytest.raises(PSUnavailableError, match=r"variable 'w' on ps:0 .* is lost"):
            client.read([lost]).get_value()
    assert value_of(client, kept).tolist() == [3, 4]


def test_keyed_update_is_made_once(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    outcomes = [one(client, ref, c.add(ref, [1, 1]), key="epoch 3") for _ in range(3)]
    assert outcomes == [(2, True, None)] * 3
    assert one(client, ref, c.add(ref, [1, 1]), key="epoch 4").version == 3


def test_status_has_variables_and_their_cost(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    one(client, ref, c.apply(ref, Adam(), [1, 1]))
    value_of(client, ref)
    message = client.status().get_value()
    assert (message["task"], message["sessions"]) == ("ps:0", 1)
    (figures,) = message["variables"]
    assert figures["name"] == "w"
    assert (figures["bytes"], figures["bytes_in"], figures["bytes_out"], figures["updates"]) == (
        24,
        8,
        8,
        1,
    )


def test_handle_can_be_pickled(client: PsClient, make: Make) -> None:
    ref = make([1, 2])
    assert pickle.loads(pickle.dumps(ref)) == ref


def test_integer_division_rounds_to_zero(client: PsClient, make: Make) -> None:
    large = (1 << 62) + 1
    ref = make([7, -7, 7, -7, 6, large], "i8")
    by = IndexedSlices(np.array([2, 2, -2, -2, -3, 1]), np.arange(6))
    assert one(client, ref, c.scatter(ref, "div", by)).applied
    assert value_of(client, ref).tolist() == [3, -3, -3, 3, -2, large]
    with pytest.raises(
        InvalidArgumentError, match="'w' on ps:0: whole numbers cannot be divided by 0"
    ):
        one(client, ref, c.scatter(ref, "div", IndexedSlices(np.array([1, 0]), np.array([0, 1]))))
    assert value_of(client, ref).tolist() == [3, -3, -3, 3, -2, large]


@pytest.mark.parametrize(
    ("dtype", "first", "value", "message"),
    [
        ("f4", [1, 2], [[1], [1, 2]], "lists of unequal lengths"),
        ("U3", ["abc", "d"], np.array(["abcd", "d"]), "cannot hold 'abcd'"),
        ("S2", [b"ab"], np.array([b"abc"]), "cannot hold b'abc'"),
        ("i1", [0, 0], np.array([1, 300]), "cannot hold 300"),
        ("i1", [0, 0], np.array([1, 200], np.uint8), "cannot hold 200"),
        ("u2", [0, 0], np.array([1, 70_000], np.uint32), "cannot hold 70000"),
        ("i8", [0], np.array([2**63], np.uint64), "cannot hold 9223372036854775808"),
        ("M8[D]", ["2024-01-01"], np.array(["2024-01-01T12"], "M8[h]"), "cannot hold datetime"),
        ("f4", [0], np.ma.masked_array([1.0]), "MaskedArray"),
    ],
)
def test_unfit_value_is_refused_by_name(
    dtype: str, first: Any, value: Any, message: str, client: PsClient, make: Make
) -> None:
    ref = make(first, dtype)
    rows = IndexedSlices(value, np.arange(len(value))) if type(value) is np.ndarray else None
    for change in (
        lambda: c.assign(ref, value),
        lambda: c.add(ref, value),
        lambda: c.restore(ref, value, {}),
        lambda: c.apply(ref, SGD(1.0), value),
        *(
            []
            if rows is None
            else [lambda: c.scatter(ref, "add", rows), lambda: c.apply(ref, SGD(1.0), rows)]
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=f"'w' on ps:0.*{message}"):
            change()


def test_nat_and_wider_small_numbers_fit(client: PsClient, make: Make) -> None:
    ref = make([1, 2], "i1")
    assert one(client, ref, c.assign(ref, np.array([127, -128]))).applied
    assert value_of(client, ref).tolist() == [127, -128]
    ref = make(["2024-01-01"], "M8[D]")
    assert one(client, ref, c.assign(ref, np.array(["NaT"], "M8[ns]"))).applied
    assert np.isnat(value_of(client, ref)).all()


def test_short_text_in_wider_array_fits(client: PsClient, make: Make) -> None:
    ref = make(["abc", "d"], "U3")
    assert one(client, ref, c.assign(ref, np.array(["x", "yz"], "U8"))).applied
    assert value_of(client, ref).tolist() == ["x", "yz"]


def test_unused_functions_are_forgotten(client: PsClient, make: Make) -> None:
    ref = make([0])
    pickles = []
    for number in range(5):
        change = c.apply(ref, lambda value, grad, slots, step, more=number: value + more, [1])
        one(client, ref, change)
        pickles.append(weakref.ref(change[1]))
    del change
    gc.collect()
    assert value_of(client, ref).tolist() == [10]
    assert [pickle() for pickle in pickles] == [None] * 5


def test_loop_makes_sparse_updates_of_few_rows() -> None:
    """The rows count, not the variable's size; slots of an optimizer are as large as the variable."""
    table = HostedVariable("table", "table", np.zeros((100_000, 64), np.float32))
    few, many = np.arange(100), np.arange(5000)
    rows = np.ones((100, 64), np.float32)
    step = (1, "apply", *SGD(0.1, momentum=0.9).to_wire(), (few, rows))
    assert is_small([table], [(1, "scatter", "add", few, rows)])
    assert not is_small([table], [(1, "scatter", "add", many, 1)])
    assert not is_small([table], [step])
    table.commit(table.prepare(step[1:], lambda _: ("", None)))
    assert is_small([table], [step])


def test_rows_that_repeat_are_updated_repeatedly() -> None:
    table = HostedVariable("table", "table", np.zeros((4, 2)))
    rows = np.array([[1.0, 1], [2, 2], [4, 4], [8, 8]])
    for op, sums in (("add", [8, 0, 3, 4]), ("sub", [0, 0, 0, 0])):
        change = "scatter", op, np.array([2, 2, 3, 0]), rows
        table.commit(table.prepare(change, lambda _: ("", None)))
        assert table.read()[:, 0].tolist() == sums
