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


def test_ctrl_c_during_import_is_silent() -> None:
    result = subprocess.run(
        [sys.executable, "-c", DURING], capture_output=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, b"", b"")


def test_handler_restored_after_import() -> None:
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
