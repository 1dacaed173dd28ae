"""Which operator of a pipeline raised an error: read from the traceback, so that it costs nothing where nothing fails."""

from __future__ import annotations

from types import TracebackType

from zmqdist.data.iterators import OperatorNode


def culprit(error: BaseException) -> str:
    """The operator that was at work where an error came from, as `explain` writes it; "" where there was none."""
    found: OperatorNode | None = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, OperatorNode):
            found = owner
        trace = trace.tb_next
    if found is None:
        return ""
    try:
        return str(found.op.one_line())
    except Exception:  # an argument's own == or repr
        return str(found.op.name)
