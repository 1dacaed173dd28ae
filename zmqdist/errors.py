"""The error classes of zmqdist. Some calls also raise Python's own errors, such as a TypeError for
an argument of a wrong type.

    OpError                     has a code (0 to 16, the numbers of TensorFlow and gRPC) and a message
      CancelledError        1   the operation was cancelled
      UnknownError          2   user code raised, or a port could not be bound (also a RuntimeError)
      InvalidArgumentError  3   the caller's mistake, whatever the state of the system (also a ValueError)
        WireError               bytes that are not a zmqdist message; names the peer
      DeadlineExceededError 4   the caller's own deadline passed (also a TimeoutError)
      NotFoundError         5
      AlreadyExistsError    6
      PermissionDeniedError 7   the peer is known, but may not do this
      ResourceExhaustedError 8  a bound of limits.py, of memory, of the disk or of open files was reached
      FailedPreconditionError 9 the call is valid, but not in the present state (also a RuntimeError)
        ProtocolMismatchError   the two processes speak different major versions of the protocol
        DrainRefusedError       workers stay, because a drain would lose values or work; has their names
      AbortedError          10
      OutOfRangeError       11
      UnimplementedError    12
      InternalError         13  (also a RuntimeError)
      UnavailableError      14  the peer is lost or has not started; trying again may help
        WorkerLost              too many attempts of a work item ended with the loss of its process or worker
        PSUnavailableError      a task that hosts variables is lost, and with it their values
      DataLossError         15  (also a RuntimeError)
      UnauthenticatedError  16  the key or token was refused
    ClosureInputError           an input of a scheduled function has no value; `original_exception` is the reason
    ClosureAbortedError         a value is missing because another operation failed; `original_exception` is that failure
    ConfigError                 a file that the user wrote is wrong: file, line, key, hint

Where TensorFlow raises one of Python's own errors, such as ValueError, the class of zmqdist is a
subclass of this error, too.

What to do about an error: after an UnavailableError other than WorkerLost try again, and show an
UnknownError to the user. A CancelledError, DeadlineExceededError, AbortedError or OutOfRangeError
may occur in a correct program. After most other errors, correct the program, its settings or its
host. A bug in zmqdist itself raises InternalError or AssertionError.

All errors can be pickled (tests/test_errors.py).
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DATA_LOSS",
    "DEADLINE_EXCEEDED",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OK",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNKNOWN",
    "AbortedError",
    "AlreadyExistsError",
    "CancelledError",
    "ClosureAbortedError",
    "ClosureInputError",
    "ConfigError",
    "DataLossError",
    "DeadlineExceededError",
    "DrainRefusedError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OpError",
    "OutOfRangeError",
    "PSUnavailableError",
    "PermissionDeniedError",
    "ProtocolMismatchError",
    "ResourceExhaustedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "WireError",
    "WorkerLost",
    "LostStart",
    "error_code_from_exception_type",
    "exception_type_from_error_code",
]
__dir__ = __all__.copy  # dir() and completion show no other names


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

    >>> try:
    ...     zd.data.Dataset.range(3).batch(0)
    ... except zd.errors.OpError as error:
    ...     print(error.error_code == zd.errors.INVALID_ARGUMENT)
    True

    The constructor takes the arguments of TensorFlow's class, so that programs that use `tf.errors`
    need no changes. Classes with a fixed code also accept the message as the only argument.
    `node_def` and `op` have no meaning in zmqdist, and are None in every error that zmqdist raises.

    Attributes:
      message: a text that says what happened.
      error_code: one of the constants of this module.
      experimental_payloads: a dict with further data from the remote process. Empty by default.
    """

    def __init__(
        self, node_def: Any, op: Any, message: str, error_code: int, *payloads: dict[Any, Any]
    ) -> None:
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
        # all attributes, including notes, the remote traceback and what user code has added
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[OpError], args: tuple[Any, ...], state: dict[str, Any]) -> OpError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class _Coded(OpError):
    """The base class of errors with a fixed code. The arguments are (node_def, op, message,
    *payloads), as in TensorFlow, or only the message.
    """

    code: int

    def __init__(
        self, node_def: Any, op: Any = None, message: str | None = None, *payloads: dict[Any, Any]
    ) -> None:
        if message is None:
            node_def, message = None, node_def
        super().__init__(node_def, op, message, self.code, *payloads)


class CancelledError(_Coded):
    """The operation was cancelled, usually by its caller."""

    code = CANCELLED


class UnknownError(_Coded, RuntimeError):
    """User code raised an exception, or an operation failed for a reason that no other class
    describes."""

    code = UNKNOWN


class InvalidArgumentError(_Coded, ValueError):
    """The caller passed an argument that can never work, whatever the state of the system."""

    code = INVALID_ARGUMENT


class DeadlineExceededError(_Coded, TimeoutError):
    """The caller's deadline has passed. The operation may have succeeded all the same."""

    code = DEADLINE_EXCEEDED


class NotFoundError(_Coded):
    """The requested object does not exist."""

    code = NOT_FOUND


class AlreadyExistsError(_Coded):
    """The object that the caller wants to create already exists."""

    code = ALREADY_EXISTS


class PermissionDeniedError(_Coded):
    """The caller is authenticated, but its role does not allow this operation."""

    code = PERMISSION_DENIED


class ResourceExhaustedError(_Coded):
    """A bound of `zmqdist.limits`, of memory, of the disk or of open files was reached."""

    code = RESOURCE_EXHAUSTED


class FailedPreconditionError(_Coded, RuntimeError):
    """The call is valid, but not in the present state."""

    code = FAILED_PRECONDITION


class AbortedError(_Coded):
    """Another event ended the operation before it was done. For example, its session ended, or the
    variable that it needs was dropped."""

    code = ABORTED


class OutOfRangeError(_Coded):
    """The position is past the end of a sequence."""

    code = OUT_OF_RANGE


class UnimplementedError(_Coded):
    """The peer, or the object, does not offer this operation."""

    code = UNIMPLEMENTED


class InternalError(_Coded, RuntimeError):
    """A rule inside zmqdist was broken. Please report it."""

    code = INTERNAL


class UnavailableError(_Coded):
    """The peer is lost or has not started. Trying again may help."""

    code = UNAVAILABLE


class DataLossError(_Coded, RuntimeError):
    """Stored or received data is damaged beyond repair."""

    code = DATA_LOSS


class UnauthenticatedError(_Coded):
    """The peer refused the key or token of this process, or failed to prove its own identity."""

    code = UNAUTHENTICATED


class WireError(InvalidArgumentError):
    """A peer has sent bytes that are not a message of zmqdist.

    Attributes:
      peer: the peer that has sent the bytes.
      problem: what is wrong with the bytes.
    """

    def __init__(self, peer: str, problem: str) -> None:
        super().__init__(f"peer {peer}: {problem}")
        # The arguments of an error are those of its constructor, so that pickle makes it again.
        self.args = peer, problem
        self.peer = peer
        self.problem = problem


class ProtocolMismatchError(FailedPreconditionError):
    """The two processes speak different major versions of the protocol.

    Attributes:
      peer: a text that names the peer.
      ours, theirs: the versions (major, minor) of this process and of the peer.
    """

    def __init__(self, peer: str, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        older = "this side" if tuple(ours) < tuple(theirs) else peer
        super().__init__(
            f"{peer} speaks zmqdist protocol {theirs[0]}.{theirs[1]}, this side "
            f"{ours[0]}.{ours[1]}: "
            f"install the same zmqdist on both ends (the older one is {older})"
        )
        self.peer = peer
        self.ours = tuple(ours)
        self.theirs = tuple(theirs)
        self.args = peer, self.ours, self.theirs


class DrainRefusedError(FailedPreconditionError):
    """No worker was drained, because a drain would lose values, functions or data tasks that only
    the leaving workers have.

    A value or function is named by its function and the number of its work item, for example
    "load-3".

    Attributes:
      workers: the names of the workers that would lose something, as "worker:1".
      values: the names of the kept values that have no lineage.
      values_unknown: the number of kept values whose programs did not report their names and
        lineage to the dispatcher in time.
      functions: the names of the functions that only these workers may run.
      data_tasks: the names of the data service's jobs that would lose the rest of a task, because
        no other worker reads it.
      actors: the actors without restarts on these workers, each as its class and name.
    """

    def __init__(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Args:
        reports: the dispatcher's drain report of each worker that would lose something
          (`DrainReport.to_dict`).
        """
        losses = "; ".join(
            f"{report['worker']}: {loss}" for report in reports for loss in report["losses"]
        )
        super().__init__(
            "a drain would lose what only the leaving workers have, so no worker leaves unless you "
            f"force it: {losses}"
        )
        self.args = (list(reports),)
        self.workers = tuple(report["worker"] for report in reports)
        self.values = tuple(name for report in reports for name in report["lost"])
        self.values_unknown = sum(report["unknown"] for report in reports)
        self.functions = tuple(name for report in reports for name in report["pinned"])
        self.data_tasks = tuple(
            job for report in reports for job, _, moves in report["data"] if not moves
        )
        self.actors = tuple(name for report in reports for name in report["lost_actors"])


class LostStart(tuple[str, int, "int | None", str]):
    """One attempt of a work item that ended because its process crashed or its worker was lost.

    >>> zd.errors.LostStart("worker:0", 1, -9, "").exit_code
    -9

    This is a tuple (worker, attempt, exit_code, log), so that a message can carry it unchanged.
    `exit_code` is as in `subprocess`: -9 means that SIGKILL ended the process. None means that no
    process has read the exit code. `log` has the last lines of the process's output.
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


def of_the_system(error: BaseException) -> OpError | None:
    """Return the error that says what to do about a failure of the operating system. Return None if
    `error` is not one."""
    if (
        isinstance(error, MemoryError)
        or str(error) == "can't start new thread"
        or "failed to map segment" in str(error)
    ):
        return ResourceExhaustedError(
            "this process gets no more memory or threads: raise `ulimit -v` or `ulimit -u`, or "
            "the limit of its control group"
        )
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceExhaustedError("this process may open no more files: raise `ulimit -n`")
    text = f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhaustedError(
            f"{text}: make room on that disk, or set TMPDIR to a folder on another one"
        )
    return FailedPreconditionError(
        f"{text}: let this user write there, or set TMPDIR to another folder"
    )


@contextlib.contextmanager
def naming_system_errors() -> Iterator[None]:
    """Return a context manager that raises the error of `of_the_system` in place of a failure of
    the operating system."""
    try:
        yield
    except Exception as error:
        named = of_the_system(error)
        if named is None:
            raise
        raise named from None


def describe_exit(code: int) -> str:
    """Return a phrase for an exit code: "killed by SIGSEGV" for -11, "exit code 3" for 3."""
    if code >= 0:
        return f"exit code {code}"
    import signal

    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def needs(subject: str, package: str) -> str:
    """Return the text of an error: `subject` cannot work without a package, which is not
    installed."""
    return f"{subject} needs {package}: pip install {package}"


class WorkerLost(UnavailableError):
    """The process or worker of a work item was lost while the function ran, `attempts_max` times
    (DispatcherConfig). If processes crashed, the function is probably the cause.

    Attributes:
      function: the function, as `module.name`.
      starts: a `LostStart` for each attempt that was lost, the oldest first.
    """

    def __init__(self, function: str, starts: tuple[LostStart, ...]) -> None:
        self.function = function
        self.starts = tuple(LostStart(*start) for start in starts)
        count = "once" if len(self.starts) == 1 else f"{len(self.starts)} times"
        text = f"{function} was started {count}, and its process or worker was lost: " + ", ".join(
            map(str, self.starts)
        )
        if any(start.exit_code == -9 for start in self.starts):
            text += (
                ". A SIGKILL that no process sent comes from the kernel, because memory ran out: "
                "see `dmesg`, and memory.events of "
                "the control group"
            )
        log = next((start.log for start in reversed(self.starts) if start.log), "")
        if log:
            text += f"\nlast lines of the last process that wrote any:\n{log}"
        super().__init__(text)
        self.args = function, self.starts


class ActorLostError(UnavailableError):
    """The process of an actor ended, or the actor was ended, before a call had ended.

    Attributes:
      call: the call, as "Counter.add".
      reason: how the actor or its process ended, with the last lines of its standard error.
      maybe_executed: False if the call was never sent, so that it may be made again elsewhere; True
        if it may have run, as a whole or in part.
    """

    def __init__(self, call: str, reason: str, maybe_executed: bool) -> None:
        self.call, self.reason, self.maybe_executed = call, reason, maybe_executed
        fate = "may have been executed" if maybe_executed else "was not executed"
        super().__init__(f"{call} {fate}: {reason}")
        self.args = call, reason, maybe_executed


class PSUnavailableError(UnavailableError):
    """A task that hosts variables is lost, and with it the values of the variables.

    Attributes:
      original_exception: the UnavailableError that led to this one.
      address: the address of the task. "" means that it is not known.
    """

    def __init__(self, original_exception: UnavailableError, address: str = "") -> None:
        if not isinstance(original_exception, UnavailableError):
            raise AssertionError(
                f"original_exception must be an UnavailableError, not a "
                f"{type(original_exception).__name__}"
            )
        super().__init__(
            original_exception.node_def, original_exception.op, original_exception.message
        )
        self.original_exception = original_exception
        self.address = address


class _Derived(Exception):
    """An error that is the consequence of another error. If the other error is a consequence
    itself, this error refers to the first error of the chain, because the user has to correct the
    first error.

    Attributes:
      original_exception: the first error, which is also the `__cause__`.
    """

    prefix: str
    original_exception: BaseException

    def __init__(self, original_exception: BaseException) -> None:
        while isinstance(original_exception, _Derived):
            original_exception = original_exception.original_exception
        super().__init__(original_exception)
        self.original_exception = original_exception
        self.__cause__ = original_exception
        self.__traceback__ = original_exception.__traceback__

    def __str__(self) -> str:
        return f"{self.prefix}: {self.original_exception!r}: {self.original_exception}"


class ClosureInputError(_Derived):
    """A scheduled function did not run, because one of its inputs has no value."""

    prefix = "Input has an error, so the function was not run"


class ClosureAbortedError(_Derived):
    """A value is not available, because another function failed, or the worker that held the value
    was lost."""

    prefix = "This value is not available, because another function failed or a worker was lost"


class ConfigError(Exception):
    """A file that the user wrote is wrong.

    Attributes:
      path, line: the file, and the line in the file, counted from 1.
      key: the path of the key, with dots. `(file)` means the whole file.
      problem: a phrase that says what is wrong.
      hint: a phrase that says what to do. It may be empty.
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
    """Return the name of an error code, such as "INVALID_ARGUMENT". If the code has no name, return
    its number as text."""
    return next(
        (name for name, code in globals().items() if name.isupper() and code == error_code),
        str(error_code),
    )


def exception_type_from_error_code(error_code: int) -> type[OpError]:
    """Return the error class of a code. Raises KeyError if no class has this code, as for OK.

    >>> zd.errors.exception_type_from_error_code(zd.errors.NOT_FOUND).__name__
    'NotFoundError'
    """
    return _BY_CODE[error_code]


def error_code_from_exception_type(cls: type[BaseException]) -> int:
    """Return the code of an error class. If the class has no code, return UNKNOWN and warn.

    >>> zd.errors.error_code_from_exception_type(zd.errors.NotFoundError) == zd.errors.NOT_FOUND
    True
    """
    code = getattr(cls, "code", None)
    if isinstance(cls, type) and issubclass(cls, OpError) and isinstance(code, int):
        return code
    warnings.warn(f"{cls!r} is not an error class of zmqdist", stacklevel=2)
    return UNKNOWN


def from_code(error_code: int, message: str) -> OpError:
    """Return an error with the code and message of a reply. If the code is unknown, return an
    UnknownError and warn."""
    cls = _BY_CODE.get(error_code)
    if cls is None:
        warnings.warn(f"unknown error code {error_code}", stacklevel=2)
        return UnknownError(message)
    return cls(message)
