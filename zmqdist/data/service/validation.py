"""What is asked by message, checked before anything is done with it.

What a peer says may be kept in the journal, and a journal that cannot be read again is the end of a dispatcher. So each method says by
its annotations what its arguments are, and who sends anything else is told so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

import msgspec

from zmqdist.errors import InvalidArgumentError

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
"""What a peer counts or names; -1 for none, or without end."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def checked(name: str, fn: Callable[..., None]) -> Callable[..., None]:
    """`fn(call, *args)`, called only with arguments that are what its annotations say.

    Raises (the result): InvalidArgumentError: they are not.
    """
    hints = get_type_hints(fn, include_extras=True)
    fields = [
        (each.name, hints[each.name], msgspec.NODEFAULT if each.default is each.empty else each.default)
        for each in list(inspect.signature(fn).parameters.values())[1:]
    ]
    wanted = msgspec.defstruct(f"{name}_arguments", fields, array_like=True, forbid_unknown_fields=True)

    def checked_call(call: Any, *args: Any) -> None:
        try:
            known = msgspec.convert(args, wanted)
        except msgspec.ValidationError as error:
            text = f"{name}: {error} of what was sent: its sender is no zmqdist, or of another version"
            raise InvalidArgumentError(text) from None
        fn(call, *msgspec.structs.astuple(known))

    return checked_call
