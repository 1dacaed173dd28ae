"""The types of `submit`, `map` and the other methods that run a function of the program, for type
checkers. At run time each decorator returns the method as it is.

1. Arguments are checked against the parameters of the function, as those of a plain call, and the
   result has the function's type T; a coroutine function gives what it returns.
2. A RemoteValue[A] may stand for an A in the first four positions, and so may a PerSlot[A]. Python
   has no type for "each parameter, or a RemoteValue of its type", so there is an overload for each
   position of the last RemoteValue. What stands after it, and keyword arguments, are plain values.
3. The items of a list, dict or set of RemoteValues, and resources of workers, are not checked.

The overloads with RemoteValues come first: otherwise `def same(x: T) -> T` of a RemoteValue[int]
would give a RemoteValue[RemoteValue[int]].

Not here: RemoteValues at other places, as keyword arguments or deeper. `schedule`, which takes its
arguments as a tuple, checks none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Coroutine, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from typing import Concatenate, Protocol, TypeAlias, TypeVar, overload

    from typing_extensions import ParamSpec

    from zmqdist.scheduling.coordinator.function_stream import FunctionStream
    from zmqdist.scheduling.coordinator.options import Retries
    from zmqdist.scheduling.coordinator.ordered_results import OrderedResults
    from zmqdist.scheduling.coordinator.per_worker import PerSlot, PerWorkerValues
    from zmqdist.scheduling.coordinator.remote_value import RemoteValue

    P = ParamSpec("P")
    T = TypeVar("T")
    A = TypeVar("A")
    B = TypeVar("B")
    C = TypeVar("C")
    D = TypeVar("D")
    K = TypeVar("K")

    Later: TypeAlias = RemoteValue[A] | PerSlot[A]
    """An argument that is an A only on the worker."""
    Several: TypeAlias = (
        PerWorkerValues
        | Sequence[RemoteValue[Any]]
        | AbstractSet[RemoteValue[Any]]
        | Mapping[Any, RemoteValue[Any]]
    )
    Given: TypeAlias = A | Later[A] | Several
    Items: TypeAlias = Iterable[A | RemoteValue[A]]
    Async: TypeAlias = Coroutine[Any, Any, T]

    class Submit(Protocol):
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[Any, P], Async[T]],
            a: Several,
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[Any, P], T],
            a: Several,
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, Any, P], T],
            a: Given[A],
            b: Several,
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, P], Async[T]],
            a: Later[A],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, P], T],
            a: Later[A],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, B, P], Async[T]],
            a: Given[A],
            b: Later[B],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, B, P], T],
            a: Given[A],
            b: Later[B],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, B, C, P], Async[T]],
            a: Given[A],
            b: Given[B],
            c: Later[C],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, B, C, P], T],
            a: Given[A],
            b: Given[B],
            c: Later[C],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, B, C, D, P], T],
            a: Given[A],
            b: Given[B],
            c: Given[C],
            d: Later[D],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self, fn: Callable[P, Async[T]], /, *args: P.args, **kwargs: P.kwargs
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
        ) -> RemoteValue[T]: ...

    class Schedule(Protocol):
        @overload
        def __call__(
            self,
            fn: Callable[..., Async[T]],
            args: Iterable[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            *,
            worker: int | str | None = None,
            priority: int = 0,
            keep: bool = False,
            retries: int | Retries = 0,
            timeout: float | None = None,
            lineage: bool = False,
            resources: Mapping[str, float] | None = None,
        ) -> RemoteValue[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[..., T],
            args: Iterable[Any] | None = None,
            kwargs: Mapping[str, Any] | None = None,
            *,
            worker: int | str | None = None,
            priority: int = 0,
            keep: bool = False,
            retries: int | Retries = 0,
            timeout: float | None = None,
            lineage: bool = False,
            resources: Mapping[str, float] | None = None,
        ) -> RemoteValue[T]: ...

    class Map(Protocol):
        @overload
        def __call__(
            self, fn: Callable[[A], Async[T]], items: Iterable[RemoteValue[A]], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[[A], Async[T]], items: Iterable[A], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[[A], T], items: Iterable[RemoteValue[A]], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(self, fn: Callable[[A], T], items: Iterable[A], /) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[[A, B], Async[T]], a: Items[A], b: Items[B], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[[A, B], T], a: Items[A], b: Items[B], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self, fn: Callable[[A, B, C], T], a: Items[A], b: Items[B], c: Items[C], /
        ) -> list[RemoteValue[T]]: ...
        @overload
        def __call__(
            self,
            fn: Callable[..., T],
            a: Items[Any],
            b: Items[Any],
            c: Items[Any],
            d: Items[Any],
            /,
            *more: Items[Any],
        ) -> list[RemoteValue[T]]: ...

    class Imap(Protocol):
        @overload
        def __call__(
            self, fn: Callable[[A], Async[T]], items: Iterable[A], /, *, ahead: int = ...
        ) -> OrderedResults[T]: ...
        @overload
        def __call__(
            self, fn: Callable[[A], T], items: Iterable[RemoteValue[A]], /, *, ahead: int = ...
        ) -> OrderedResults[T]: ...
        @overload
        def __call__(
            self, fn: Callable[[A], T], items: Iterable[A], /, *, ahead: int = ...
        ) -> OrderedResults[T]: ...
        @overload
        def __call__(
            self, fn: Callable[[A, B], T], a: Items[A], b: Items[B], /, *, ahead: int = ...
        ) -> OrderedResults[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[..., T],
            a: Items[Any],
            b: Items[Any],
            c: Items[Any],
            /,
            *more: Items[Any],
            ahead: int = ...,
        ) -> OrderedResults[T]: ...

    class Stream(Protocol):
        @overload  # a ParamSpec has no place for `ahead`
        def __call__(
            self,
            fn: Callable[..., Iterable[T] | AsyncIterable[T]],
            /,
            *args: Any,
            ahead: int,
            **kwargs: Any,
        ) -> FunctionStream[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, P], Iterable[T] | AsyncIterable[T]],
            a: Later[A],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> FunctionStream[T]: ...
        @overload
        def __call__(
            self,
            fn: Callable[P, Iterable[T] | AsyncIterable[T]],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> FunctionStream[T]: ...

    class Run(Protocol):
        @overload
        def __call__(
            self,
            fn: Callable[Concatenate[A, P], T],
            a: Later[A],
            /,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> dict[str, T]: ...
        @overload
        def __call__(
            self, fn: Callable[P, Async[T]], /, *args: P.args, **kwargs: P.kwargs
        ) -> dict[str, T]: ...
        @overload
        def __call__(
            self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
        ) -> dict[str, T]: ...

    class Gather(Protocol):
        @overload
        def __call__(self, values: RemoteValue[T], *, timeout: float | None = None) -> T: ...
        @overload
        def __call__(
            self,
            values: list[RemoteValue[T]] | Iterator[RemoteValue[T]],
            *,
            timeout: float | None = None,
        ) -> list[T]: ...
        @overload
        def __call__(
            self, values: tuple[RemoteValue[A], RemoteValue[B]], *, timeout: float | None = None
        ) -> tuple[A, B]: ...
        @overload
        def __call__(
            self, values: tuple[RemoteValue[T], ...], *, timeout: float | None = None
        ) -> tuple[T, ...]: ...
        @overload
        def __call__(
            self, values: dict[K, RemoteValue[T]], *, timeout: float | None = None
        ) -> dict[K, T]: ...
        @overload
        def __call__(self, values: object, *, timeout: float | None = None) -> Any: ...

    class Fetch(Protocol):
        @overload
        def __call__(self, val: RemoteValue[T]) -> T: ...
        @overload
        def __call__(self, val: list[RemoteValue[T]] | Iterator[RemoteValue[T]]) -> list[T]: ...
        @overload
        def __call__(self, val: object) -> Any: ...


def as_submit(method: Callable[..., Any]) -> Submit:
    return method


def as_schedule(method: Callable[..., Any]) -> Schedule:
    return method


def as_map(method: Callable[..., Any]) -> Map:
    return method


def as_imap(method: Callable[..., Any]) -> Imap:
    return method


def as_stream(method: Callable[..., Any]) -> Stream:
    return method


def as_run(method: Callable[..., Any]) -> Run:
    return method


def as_gather(method: Callable[..., Any]) -> Gather:
    return method


def as_fetch(method: Callable[..., Any]) -> Fetch:
    return method
