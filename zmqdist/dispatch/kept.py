"""Values that stay with their worker until somebody uses them: how they are fetched, and how they come to be arguments.

In the pickle of the arguments a kept value is a call of `value` with its reference: it is fetched where it is unpickled, by whatever
the present thread fetches with.
"""

from __future__ import annotations

import threading
from typing import Any

from zmqdist import errors
from zmqdist.dispatch.call import Fetches
from zmqdist.dispatch.references import decode_reference
from zmqdist.wire import trusted

_here = threading.local()


def fetch_with(fetcher: Fetches) -> None:
    """The present thread runs functions: their arguments that are kept values are fetched by this one."""
    _here.fetcher = fetcher


def value(encoded: bytes, name: str) -> Any:
    """What the pickle of a kept value calls; the name is part of the protocol. Raises as `fetch`."""
    return fetch(_here.fetcher, encoded, name)


def fetch(fetcher: Fetches, encoded: bytes, name: str) -> Any:
    """The value, private to the caller; it stays with its worker, too.

    Args:
      encoded: the reference to it.
      name: of the function that returned it, for the error.

    Raises:
      UnavailableError: its worker has ended, or has let go of it.
      Exception: what a class in it raises while it is rebuilt.
    """
    reference = decode_reference(encoded)
    try:
        parts = fetcher.fetch(reference)
    except (errors.UnavailableError, errors.NotFoundError, errors.DeadlineExceededError) as error:
        problem = (
            f"the value of {name} was kept by the worker at {reference.address} and is lost: schedule {name} again"
            f" ({error.message})"
        )
        raise errors.UnavailableError(None, None, problem) from None
    return trusted.unpack_parts(parts)
