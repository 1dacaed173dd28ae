"""The tree of errors: codes, constructors, pickles."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from zmqdist import errors

CODED = [
    (1, "CANCELLED", errors.CancelledError),
    (2, "UNKNOWN", errors.UnknownError),
    (3, "INVALID_ARGUMENT", errors.InvalidArgumentError),
    (4, "DEADLINE_EXCEEDED", errors.DeadlineExceededError),
    (5, "NOT_FOUND", errors.NotFoundError),
    (6, "ALREADY_EXISTS", errors.AlreadyExistsError),
    (7, "PERMISSION_DENIED", errors.PermissionDeniedError),
    (8, "RESOURCE_EXHAUSTED", errors.ResourceExhaustedError),
    (9, "FAILED_PRECONDITION", errors.FailedPreconditionError),
    (10, "ABORTED", errors.AbortedError),
    (11, "OUT_OF_RANGE", errors.OutOfRangeError),
    (12, "UNIMPLEMENTED", errors.UnimplementedError),
    (13, "INTERNAL", errors.InternalError),
    (14, "UNAVAILABLE", errors.UnavailableError),
    (15, "DATA_LOSS", errors.DataLossError),
    (16, "UNAUTHENTICATED", errors.UnauthenticatedError),
]
REPORTS = [
    {
        "worker": "worker:1",
        "losses": [
            "1 kept value that has no lineage: load-3",
            "1 function that only worker:1 may run: sum-4",
        ],
        "lost": ["load-3"],
        "unknown": 2,
        "pinned": ["sum-4"],
        "data": [["train", "FILE", False], ["test", "DYNAMIC", True]],
        "lost_actors": ["Counter n"],
    }
]
STARTS = (
    errors.LostStart("worker:0", 1, -11, ""),
    errors.LostStart("worker:1", 2, None, "last words"),
)
SAMPLES: list[Exception] = [
    errors.OpError("node", "op", "message", 7, {"a": 1}, {"b": 2}),
    *(cls(None, None, "message", {"key": "value"}) for _, _, cls in CODED),
    errors.WireError("tcp://peer", "no header"),
    errors.ProtocolMismatchError("the server", (1, 0), (2, 3)),
    errors.DrainRefusedError(REPORTS),
    errors.WorkerLost("module.work", STARTS),
    errors.PSUnavailableError(errors.UnavailableError(None, None, "ps:0 is gone")),
    errors.ClosureInputError(ValueError("first")),
    errors.ClosureAbortedError(errors.UnavailableError(None, None, "gone")),
    errors.ConfigError("cluster.yaml", 7, "jobs.worker", "no such key", "did you mean workers?"),
]


@pytest.mark.parametrize(
    ("code", "name", "cls"), CODED, ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_codes_have_class_name_and_constructor(
    code: int, name: str, cls: type[errors.OpError]
) -> None:
    assert getattr(errors, name) == code
    assert errors.exception_type_from_error_code(code) is cls
    assert errors.error_code_from_exception_type(cls) == code
    error = cls("node", "op", "what happened", {"a": 1}, {"b": 2})
    assert (error.node_def, error.op, error.message, error.error_code) == (
        "node",
        "op",
        "what happened",
        code,
    )
    assert error.experimental_payloads == {"a": 1, "b": 2}
    assert cls(None, None, "m").experimental_payloads == {}
    assert str(error) == "what happened"
    assert type(errors.from_code(code, "m")) is cls
    assert isinstance(error, errors.OpError)


def test_coded_class_takes_message_alone() -> None:
    error = errors.NotFoundError("what happened")
    assert (error.node_def, error.op, error.message, error.error_code) == (
        None,
        None,
        "what happened",
        5,
    )
    assert str(pickle.loads(pickle.dumps(error))) == "what happened"


def test_base_class_takes_code() -> None:
    error = errors.OpError(None, None, "m", 9)
    assert (error.error_code, str(error)) == (9, "m")


def test_samples_cover_every_error() -> None:
    declared = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception)
        and cls.__module__ == errors.__name__
        and not cls.__name__.startswith("_")
    }
    assert {type(error) for error in SAMPLES} == declared


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "way",
    [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_pickled_error_keeps_data_and_notes(error: Any, way: Any) -> None:
    error.__dict__["__notes__"] = ["a note"]
    error.extra = 3
    back = way(error)
    del error.__dict__["__notes__"], error.extra
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert repr(back.args) == repr(error.args)
    assert back.__notes__ == ["a note"]
    assert back.extra == 3
    del back.__dict__["__notes__"], back.extra
    assert repr(vars(back)) == repr(vars(error))
    derived = isinstance(error, (errors.ClosureInputError, errors.ClosureAbortedError))
    assert back.__cause__ is (back.original_exception if derived else None)


def test_unknown_code_makes_unknown_error() -> None:
    with pytest.raises(KeyError):
        errors.exception_type_from_error_code(99)
    with pytest.raises(KeyError):
        errors.exception_type_from_error_code(errors.OK)
    with pytest.warns(UserWarning, match="unknown error code 99"):
        error = errors.from_code(99, "m")
    assert type(error) is errors.UnknownError
    assert str(error) == "m"


@pytest.mark.parametrize("cls", [ValueError, errors.OpError, errors.ConfigError])
def test_class_without_code_is_unknown(cls: type[BaseException]) -> None:
    with pytest.warns(UserWarning, match="not an error class"):
        assert errors.error_code_from_exception_type(cls) == errors.UNKNOWN


@pytest.mark.parametrize(
    ("cls", "base", "code"),
    [
        (errors.WireError, errors.InvalidArgumentError, 3),
        (errors.ProtocolMismatchError, errors.FailedPreconditionError, 9),
        (errors.WorkerLost, errors.UnavailableError, 14),
        (errors.DeadlineExceededError, TimeoutError, 4),
    ],
)
def test_subclasses_have_code_of_base(
    cls: type[errors.OpError], base: type[Exception], code: int
) -> None:
    assert issubclass(cls, base)
    assert errors.error_code_from_exception_type(cls) == code


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.WireError("tcp://peer", "no header"), "peer tcp://peer: no header"),
        (
            errors.ProtocolMismatchError("the server", (1, 0), (2, 3)),
            (
                "the server speaks zmqdist protocol 2.3, this side 1.0: install the same zmqdist on "
                "both ends (the older one is this side)"
            ),
        ),
        (
            errors.WorkerLost("module.work", STARTS),
            (
                "module.work was started 2 times, and its process or worker was lost: worker:0 "
                "(killed by SIGSEGV), "
                "worker:1 (exit code unknown)\nlast lines of the last process that wrote "
                "any:\nlast words"
            ),
        ),
        (errors.ConfigError("c.yaml", 7, "jobs", "bad"), "c.yaml:7: jobs: bad"),
        (
            errors.ConfigError("c.yaml", 7, "jobs", "bad", "mend it"),
            "c.yaml:7: jobs: bad (mend it)",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_build_text_from_data(error: Exception, text: str) -> None:
    assert str(error) == text


def test_lost_start_is_plain_tuple() -> None:
    start = errors.LostStart("worker:0", 2, 3, "log")
    assert tuple(start) == ("worker:0", 2, 3, "log")
    assert str(start) == "worker:0 (exit code 3)"
    assert pickle.loads(pickle.dumps(start)).worker == "worker:0"
    assert errors.describe_exit(-200) == "killed by signal 200"


@pytest.mark.parametrize("cls", [errors.ClosureInputError, errors.ClosureAbortedError])
def test_derived_error_names_innermost_error(cls: Any) -> None:
    first = ValueError("no such row")
    error = cls(errors.ClosureInputError(errors.ClosureAbortedError(first)))
    assert error.original_exception is first
    assert error.__cause__ is first
    assert not isinstance(error, errors.OpError)
    assert repr(first) in str(error)
    assert ("Input has an error" in str(error)) == (cls is errors.ClosureInputError)
    assert ("another function failed" in str(error)) == (cls is errors.ClosureAbortedError)


def test_derived_error_keeps_traceback() -> None:
    with pytest.raises(ValueError, match="deep") as raised:
        raise ValueError("deep")
    reason = raised.value
    assert errors.ClosureInputError(reason).__traceback__ is reason.__traceback__ is not None


def test_ps_loss_needs_unavailable_error() -> None:
    reason = errors.UnavailableError(None, None, "ps:0 is gone")
    error = errors.PSUnavailableError(reason)
    assert (error.original_exception, error.message, error.error_code) == (
        reason,
        "ps:0 is gone",
        errors.UNAVAILABLE,
    )
    with pytest.raises(
        AssertionError, match="original_exception must be an UnavailableError, not a ValueError"
    ):
        errors.PSUnavailableError(ValueError("x"))  # type: ignore[arg-type]
