"""Find the operator that raised an error. The operator is read from the traceback of the error, so that pipelines without errors spend no
time on this.
"""

from __future__ import annotations

from types import TracebackType

from zmqdist.data.iterators import OperatorNode


def failing_operator(error: BaseException) -> str:
    """Return the operator that was running when the error was raised, as `explain` prints it; "" if no operator was running."""
    found: OperatorNode | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, OperatorNode):
            found = owner  # go on, because the innermost node comes last in the traceback
        trace = trace.tb_next
    if found is None:
        return ""
    try:
        return str(found.op.one_line())
    except Exception:  # the `repr` of a user's object among the operator's arguments may raise any error
        return str(found.op.name)
