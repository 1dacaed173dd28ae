"""The pipe between the parent and the process of one task. A message is a word and facts, as JSON; pickled values are parts beside it.

Only these two processes have the pipe, so a pickle that arrives by it comes from a process of this run.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeAlias

from zmqdist.process.pipe import BlockingPipe, PipeCodec

TaskMessage: TypeAlias = tuple[str, Any]
"""A word, and its facts; None if the word has no facts."""

TaskPipe: TypeAlias = BlockingPipe[TaskMessage]


def _encode(message: TaskMessage) -> bytes:
    return json.dumps(message).encode()


def _decode(data: bytes) -> TaskMessage:
    word, facts = json.loads(data)
    return word, facts


TASK_CODEC: Final[PipeCodec[TaskMessage]] = PipeCodec(_encode, _decode, "a function with its arguments, or its result")
