"""Every error that zmqdist raises on purpose, in one file.

    OpError                     has a code (0 to 16, the numbers of TensorFlow and gRPC) and a message
      CancelledError        1   somebody asked for the end of it
      UnknownError          2   user code raised, or a port could not be bound (also a RuntimeError)
      InvalidArgumentError  3   the caller's mistake, whatever the state of the system (also a ValueError)
        WireError               bytes that are not a zmqdist message; names the peer
      DeadlineExceededError 4   the caller's own deadline passed (also a TimeoutError)
      NotFoundError         5
      AlreadyExistsError    6
      PermissionDeniedError 7   known, but not allowed to do this
      ResourceExhaustedError 8  a bound of limits.py was reached
      FailedPreconditionError 9 right call, wrong moment (also a RuntimeError)
        ProtocolMismatchError   the two ends speak different major versions of the protocol
      AbortedError          10
      OutOfRangeError       11
      UnimplementedError    12
      InternalError         13  (also a RuntimeError)
      UnavailableError      14  the other side is gone or not there yet; trying again may help
        WorkerLost              every worker that started this piece of work died with it
        PSUnavailableError      a task that hosts variables is gone, and with it their values
      DataLossError         15  (also a RuntimeError)
      UnauthenticatedError  16  refused key or token
    ClosureInputError           an input of a scheduled function has no value; `original_exception` says why
    ClosureAbortedError         a value is not there because something else failed; `original_exception` says what
    ConfigError                 a file that the user wrote is wrong: file, line, key, hint

Those that are also an error of Python's own are what TensorFlow raises as that one, from its servers and functions.

Which to catch: try again after an UnavailableError; show an UnknownError; mend the program for the rest.
A bug in zmqdist itself is an AssertionError and is never caught here.

Errors hold data and build their sentence from it; all of them survive a pickle (tests/test_errors.py).
"""

from __future__ import annotations

import warnings
from typing import Any

OK = 0
CANCELLED = 1
UNKNOWN = 2
INVALID_ARGUMENT = 3
DEADLINE_EXCEEDED = 4
NOT_FOUND = 5
ALREADY_EXISTS = 6
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
ABORTED = 10
OUT_OF_RANGE = 11
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14
DATA_LOSS = 15
UNAUTHENTICATED = 16


class OpError(Exception):
    """An operation of zmqdist failed.

    The constructor is TensorFlow's, so that code written against `tf.errors` ports by its names; classes with a fixed code
    also take the message alone;
    `node_def` and `op` have no meaning here and are None in every error that zmqdist raises.

    Attributes:
      message: what happened, as text.
      error_code: one of the constants of this module.
      experimental_payloads: dict of what else the remote side attached; empty by default.
    """

    def __init__(self, node_def: Any, op: Any, message: str, error_code: int, *payloads: dict[Any, Any]) -> None:
        super().__init__(node_def, op, message, error_code, *payloads)
        self.node_def = node_def
        self.op = op
        self.message = message
        self.error_code = error_code
        self.experimental_payloads: dict[Any, Any] = {}
        for payload in payloads:
            self.experimental_payloads.update(payload)

    def __str__(self) -> str:
        return str(self.message)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, _extras(self))


def _extras(error: BaseException) -> dict[str, Any]:
    """What the user or the framework hung on the instance: notes, remote traceback."""
    return dict(error.__dict__)


def _rebuild(cls: type[OpError], args: tuple[Any, ...], state: dict[str, Any]) -> OpError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class _Coded(OpError):
    """The classes with a fixed code take (node_def, op, message, *payloads), as in TensorFlow, or the message alone."""

    code: int

    def __init__(self, node_def: Any, op: Any = None, message: str | None = None, *payloads: dict[Any, Any]) -> None:
        if message is None:
            node_def, message = None, node_def
        super().__init__(node_def, op, message, self.code, *payloads)


class CancelledError(_Coded):
    """The operation was cancelled, usually by its caller."""

    code = CANCELLED


class UnknownError(_Coded, RuntimeError):
    """User code raised something that has no closer class, or the system gave no reason."""

    code = UNKNOWN


class InvalidArgumentError(_Coded, ValueError):
    """The caller gave something that can never work, whatever the state of the system."""

    code = INVALID_ARGUMENT


class DeadlineExceededError(_Coded, TimeoutError):
    """The deadline that the caller set has passed. The operation may still have happened."""

    code = DEADLINE_EXCEEDED


class NotFoundError(_Coded):
    """What was asked for does not exist."""

    code = NOT_FOUND


class AlreadyExistsError(_Coded):
    """What was to be made exists already."""

    code = ALREADY_EXISTS


class PermissionDeniedError(_Coded):
    """The peer is known, but its role does not allow this."""

    code = PERMISSION_DENIED


class ResourceExhaustedError(_Coded):
    """A bound of `zmqdist.limits`, of the disk or of memory was reached."""

    code = RESOURCE_EXHAUSTED


class FailedPreconditionError(_Coded, RuntimeError):
    """A right call at the wrong moment."""

    code = FAILED_PRECONDITION


class AbortedError(_Coded):
    """The operation was given up because something else happened first."""

    code = ABORTED


class OutOfRangeError(_Coded):
    """Past the end of a sequence."""

    code = OUT_OF_RANGE


class UnimplementedError(_Coded):
    """The other side does not offer this."""

    code = UNIMPLEMENTED


class InternalError(_Coded, RuntimeError):
    """A rule inside zmqdist was broken. Please report it."""

    code = INTERNAL


class UnavailableError(_Coded):
    """The other side is gone or not there yet. Trying again may help."""

    code = UNAVAILABLE


class DataLossError(_Coded, RuntimeError):
    """Stored or received data is damaged beyond repair."""

    code = DATA_LOSS


class UnauthenticatedError(_Coded):
    """The other side refused the key or token, or is not who it should be."""

    code = UNAUTHENTICATED


class _FromData(OpError):
    """Errors that hold data and build their sentence from it; `args` are the data, for the pickle."""

    def _set_message(self, message: str, *data: Any) -> None:
        self.message = message
        self.args = data


class WireError(InvalidArgumentError, _FromData):
    """Bytes that are not a zmqdist message.

    Attributes:
      peer: whom to blame.
      problem: what is wrong with the bytes.
    """

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__("")
        self.peer = peer
        self.problem = problem
        self._set_message(f"peer {peer}: {problem}", peer, problem)


class ProtocolMismatchError(FailedPreconditionError, _FromData):
    """The two ends speak different major versions of the protocol.

    Attributes:
      ours, theirs: (major, minor).
    """

    def __init__(self, peer: str, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        super().__init__("")
        self.peer = peer
        self.ours = tuple(ours)
        self.theirs = tuple(theirs)
        older = "this side" if self.ours < self.theirs else peer
        self._set_message(
            f"{peer} speaks zmqdist protocol {theirs[0]}.{theirs[1]}, this side {ours[0]}.{ours[1]}: "
            f"install the same zmqdist on both ends (the older one is {older})",
            peer,
            self.ours,
            self.theirs,
        )


class LostStart(tuple[str, int, "int | None", str]):
    """One start of a piece of work that ended with the death of its process.

    A tuple (worker, attempt, exit_code, log), so that it travels in a message as it is. `exit_code` is as in
    `subprocess`: negative for a signal, None where nobody saw the process end. `log` has its last lines.
    """

    __slots__ = ()

    def __new__(cls, worker: str, attempt: int, exit_code: int | None, log: str) -> LostStart:
        return super().__new__(cls, (worker, attempt, exit_code, log))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def worker(self) -> str:
        return self[0]

    @property
    def exit_code(self) -> int | None:
        return self[2]

    @property
    def log(self) -> str:
        return self[3]

    def __str__(self) -> str:
        code = "exit code unknown" if self.exit_code is None else describe_exit(self.exit_code)
        return f"{self.worker} ({code})"


def describe_exit(code: int) -> str:
    """`-11` as "killed by SIGSEGV", `3` as "exit code 3"."""
    if code >= 0:
        return f"exit code {code}"
    import signal

    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class WorkerLost(UnavailableError, _FromData):
    """Every process that started this piece of work died with it: probably the work kills them.

    Attributes:
      what: the function, as `module.name`.
      starts: tuple of `LostStart`, oldest first: worker, exit code, last log lines.
    """

    def __init__(self, what: str, starts: tuple[LostStart, ...]) -> None:
        super().__init__("")
        self.what = what
        self.starts = tuple(LostStart(*start) for start in starts)
        text = f"{what} was started {len(self.starts)} times, and each time its process died: " + ", ".join(
            map(str, self.starts)
        )
        if any(start.exit_code == -9 for start in self.starts):
            text += ". SIGKILL that nobody sent is the kernel's, because memory ran out: `dmesg` tells, and a control group's memory.events"
        log = next((start.log for start in reversed(self.starts) if start.log), "")
        if log:
            text += f"\nlast lines of the last one that wrote any:\n{log}"
        self._set_message(text, what, self.starts)


class PSUnavailableError(UnavailableError):
    """A task that hosts variables is gone, and with it their values.

    Attributes:
      original_exception: what was met, an UnavailableError.
      address: of the task; "" where it is not known.
    """

    def __init__(self, original_exception: UnavailableError, address: str = "") -> None:
        if not isinstance(original_exception, UnavailableError):
            raise AssertionError(f"made from a {type(original_exception).__name__}, wants an UnavailableError")
        super().__init__(original_exception.node_def, original_exception.op, original_exception.message)
        self.original_exception = original_exception
        self.address = address


class _Derived(Exception):
    """What follows from another error. Of a chain the innermost is told, because that one says what to mend.

    Attributes:
      original_exception: that error; it is the `__cause__`, too.
    """

    what: str
    original_exception: BaseException

    def __init__(self, original_exception: BaseException) -> None:
        while isinstance(original_exception, _Derived):
            original_exception = original_exception.original_exception
        super().__init__(original_exception)
        self.original_exception = original_exception
        self.__cause__ = original_exception
        self.__traceback__ = original_exception.__traceback__

    def __str__(self) -> str:
        return f"{self.what}: {self.original_exception!r}: {self.original_exception}"


class ClosureInputError(_Derived):
    """A scheduled function did not run, because one of its inputs has no value."""

    what = "Input has an error, so the function was not run"


class ClosureAbortedError(_Derived):
    """A value is not available, because another function, or the worker that had the value, failed."""

    what = "Another function failed, so that this value is not available"


class ConfigError(Exception):
    """A file that the user wrote is wrong.

    Attributes:
      path, line: where (line counts from 1).
      key: dotted path of the key, `(file)` for the file as a whole.
      problem: what is wrong.
      hint: what to do, without parentheses; may be empty.
    """

    def __init__(self, path: str, line: int, key: str, problem: str, hint: str = "") -> None:
        super().__init__(path, line, key, problem, hint)
        self.path = path
        self.line = line
        self.key = key
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.path}:{self.line}: {self.key}: {self.problem}"
        return f"{text} ({self.hint})" if self.hint else text


_BY_CODE: dict[int, type[_Coded]] = {
    cls.code: cls
    for cls in (
        CancelledError,
        UnknownError,
        InvalidArgumentError,
        DeadlineExceededError,
        NotFoundError,
        AlreadyExistsError,
        PermissionDeniedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        AbortedError,
        OutOfRangeError,
        UnimplementedError,
        InternalError,
        UnavailableError,
        DataLossError,
        UnauthenticatedError,
    )
}


def name_of(error_code: int) -> str:
    """A code as people write it: "INVALID_ARGUMENT"; its number where it is none of ours."""
    return next((name for name, code in globals().items() if name.isupper() and code == error_code), str(error_code))


def exception_type_from_error_code(error_code: int) -> type[OpError]:
    """The class for a code. Raises KeyError for one that does not exist."""
    return _BY_CODE[error_code]


def error_code_from_exception_type(cls: type[BaseException]) -> int:
    """The code for a class; UNKNOWN, with a warning, for a class that has none."""
    code = getattr(cls, "code", None)
    if isinstance(cls, type) and issubclass(cls, OpError) and isinstance(code, int):
        return code
    warnings.warn(f"{cls!r} is not an error class of zmqdist", stacklevel=2)
    return UNKNOWN


def from_code(error_code: int, message: str) -> OpError:
    """The error for a code that came in a reply; UnknownError, with a warning, for an unknown one."""
    cls = _BY_CODE.get(error_code)
    if cls is None:
        warnings.warn(f"unknown error code {error_code}", stacklevel=2)
        return UnknownError(message)
    return cls(message)
