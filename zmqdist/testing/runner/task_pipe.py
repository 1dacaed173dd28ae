"""The pipe between the parent and the process of one task. A message is a word and facts, encoded
as JSON. Pickled values are further parts of the message.

Only the parent and the process have the pipe, so a pickle that arrives through the pipe is from a
process of this run.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeAlias

from zmqdist.process.pipe import BlockingPipe, PipeCodec

TaskMessage: TypeAlias = tuple[str, Any]
"""(word, facts). The facts are None if the word has no facts."""

TaskPipe: TypeAlias = BlockingPipe[TaskMessage]


def _encode(message: TaskMessage) -> bytes:
    return json.dumps(message).encode()


def _decode(data: bytes) -> TaskMessage:
    word, facts = json.loads(data)
    return word, facts


TASK_CODEC: Final[PipeCodec[TaskMessage]] = PipeCodec(
    _encode, _decode, "a function with its arguments, or its result"
)
