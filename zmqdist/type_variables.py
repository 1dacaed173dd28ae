"""The type variables of generic classes that may also be written without `[...]`, as a RemoteValue
of anything. They have a default, for which Python 3.10 has no word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T_any = TypeVar("T_any", default=Any)
    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_any = TypeVar("T_any")
    T_co = TypeVar("T_co", covariant=True)
