"""The text of faulthandler as stacks."""

from __future__ import annotations

from zmqdist.process.stack_dump import Frame, parse_stacks

DUMP = """\
Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 327 in wait
  File "/job.py", line 8 in <listcomp>

Thread 0x00007f0000000002 (most recent call first):
  <no Python frame>

Current thread 0x00007f0000000003 [name] (most recent call first):
  File "/a "b", line 1 in c.py", line ??? in work
  ...
"""


def test_dump_is_parsed_outermost_call_first() -> None:
    assert parse_stacks(DUMP) == [
        [Frame("/job.py", 8, "<listcomp>"), Frame("/lib/threading.py", 327, "wait")],
        [Frame('/a "b", line 1 in c.py', 0, "work")],
    ]


def test_text_without_frames_is_no_stack() -> None:
    assert parse_stacks("") == []
