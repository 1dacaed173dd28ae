"""Ctrl-C while the command is still importing."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from zmqdist_cli.interrupts import importing

DURING = """
import os, signal
from zmqdist_cli.interrupts import importing
with importing():
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_it_ends_the_process_at_once_and_without_a_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DURING], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_afterwards_and_where_it_is_not_ours_everything_is_as_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, signal.SIG_IGN, lambda number, frame: None):
            signal.signal(signal.SIGINT, handler)
            with importing():
                ours = handler is signal.default_int_handler
                assert signal.getsignal(signal.SIGINT) is (signal.SIG_DFL if ours else handler)
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_it_does_nothing() -> None:
    entered = threading.Event()

    def enter() -> None:
        with importing():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(30)
    assert entered.is_set()
