"""Find the operator that raised an error. The operator is read from the traceback of the error, so
that pipelines without errors spend no time on this.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any


def failing_operator(error: BaseException) -> str:
    """Return the operator that was running when the error was raised, as `explain` prints it; "" if
    no operator was running."""
    found: Any = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        # Do not import the class, because its module imports this one.
        if any(each.__name__ == "OperatorNode" for each in type(owner).__mro__):
            found = owner  # go on, because the innermost node comes last in the traceback
        trace = trace.tb_next
    if found is None:
        return ""
    try:
        return str(found.op.one_line())
    except Exception:
        # the `repr` of a user's object among the operator's arguments may raise any error
        return str(found.op.name)


def stopped_error(operator: str) -> RuntimeError:
    """Return the error in place of a StopIteration of a user function, which would end a loop."""
    return RuntimeError(
        f"a function of {operator} raised StopIteration, which is for iterators only: let it "
        f"return a value or raise another"
        " error; to leave out elements use filter() or take_while()"
    )
