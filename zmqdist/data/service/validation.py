"""A check of the arguments of RPC calls, before a method uses them.

The dispatcher may write arguments of a peer into the journal, and a journal that cannot be read
again would prevent the dispatcher from starting. Therefore each method declares the types of its
arguments by annotations, and a caller that sends other arguments gets an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from zmqdist.errors import InvalidArgumentError


def checked(
    name: str, fn: Callable[..., None], like: Callable[..., Any] | None = None
) -> Callable[..., None]:
    """Return a function that calls `fn(call, *args)` after it has checked the arguments against the
    annotations of `like`, or of `fn`. Both take another argument first.

    The returned function raises InvalidArgumentError if arguments do not fit. `name` names the
    method in the error text.
    """
    hints = get_type_hints(like or fn, include_extras=True)
    fields = [
        (
            parameter.name,
            hints[parameter.name],
            msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in list(inspect.signature(like or fn).parameters.values())[1:]
    ]
    arguments_type = msgspec.defstruct(
        f"{name}_arguments", fields, array_like=True, forbid_unknown_fields=True
    )

    def checked_call(call: Any, *args: Any) -> None:
        try:
            arguments = msgspec.convert(args, arguments_type)
        except msgspec.ValidationError as error:
            text = (
                f"{name}: {error} in the arguments: the caller is no zmqdist, or of another version"
            )
            raise InvalidArgumentError(text) from None
        # leave the arguments that the caller has left out to the defaults of `fn`
        fn(call, *msgspec.structs.astuple(arguments)[: len(args)])

    return checked_call
