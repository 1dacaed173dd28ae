"""What the parent and the process of one task say to each other: a word and facts that JSON can hold; what is pickled goes as parts.

Only these two have the pipe: what is unpickled from it was sent by a process of this run.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeAlias

from zmqdist.process.pipe import BlockingPipe, PipeCodec

TaskMessage: TypeAlias = tuple[str, Any]
"""A word, and its facts: None where there are none."""

TaskPipe: TypeAlias = BlockingPipe[TaskMessage]


def _encode(message: TaskMessage) -> bytes:
    return json.dumps(message).encode()


def _decode(data: bytes) -> TaskMessage:
    word, facts = json.loads(data)
    return word, facts


TASK_CODEC: Final[PipeCodec[TaskMessage]] = PipeCodec(
    _encode, _decode, "a function with its arguments, or what came of it"
)
