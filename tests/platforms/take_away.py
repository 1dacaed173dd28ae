"""Takes from this process what Linux has, and macOS or Windows has not, before it imports zmqdist.

The libraries below zmqdist are imported first, because they choose their own calls at import. So
this shows what zmqdist does without these calls, and not what these libraries do on the system.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import pathlib
import select
import signal
import socket
import sys
import time
from typing import Any

_BELOW = """
    asyncio, cloudpickle, click, concurrent.futures, difflib, email.message, html,
    http.server, importlib.metadata, inspect, json, logging.handlers, msgspec,
    multiprocessing, numpy, pdb, pickle, platform, pydoc, queue, random, rich.console,
    secrets, shutil, shlex, subprocess, tempfile, textwrap, threading, traceback, unittest,
    urllib.request, uuid, webbrowser, yaml, zmq, zmq.auth, zmq.utils.monitor, zoneinfo
"""

LINUX_FILES = ("/proc", "/sys", "/dev/shm")

_BOTH: dict[Any, str] = {
    os: """eventfd eventfd_read eventfd_write EFD_ memfd_create MFD_ pipe2 pidfd_open sched_getaffinity
    sched_setaffinity sched_getparam sched_getscheduler sched_setscheduler waitid posix_fallocate
    posix_fadvise fdatasync getrandom getxattr setxattr splice copy_file_range O_PATH O_TMPFILE
    O_DIRECT O_NOATIME O_LARGEFILE O_RSYNC getresuid getresgid setresuid setns unshare""",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGSTKFLT SIGPOLL SIGRTM SIGCLD",
    select: "epoll EPOLL",
    socket: """SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT TCP_INFO TCP_NOTSENT_LOWAT SO_PEERCRED
    SO_PASSCRED SO_BINDTODEVICE MSG_ERRQUEUE AF_NETLINK AF_VSOCK AF_PACKET""",
    mmap: "MAP_POPULATE MAP_STACK MADV_HUGEPAGE MADV_DONTFORK MADV_REMOVE",
    time: "CLOCK_BOOTTIME CLOCK_TAI",
}
_WINDOWS: dict[Any, str] = {
    os: """fork forkpty getuid geteuid getgid getegid getgroups setuid setgid getpgid getpgrp setpgid
    setpgrp setsid getsid getpriority setpriority getloadavg killpg nice uname wait wait3 wait4
    posix_spawn sched_ sysconf confstr fchmod fchown fpathconf pathconf fstatvfs statvfs lockf mkfifo
    mknod major minor openpty pread pwrite readv writev sendfile set_blocking get_blocking ttyname
    chown lchown sync register_at_fork W P_ PRIO_ SCHED_ O_CLOEXEC O_NONBLOCK O_SYNC O_DSYNC O_NOCTTY
    O_DIRECTORY O_NOFOLLOW O_NDELAY O_ASYNC O_ACCMODE environb getenvb""",
    signal: """SIGKILL SIGHUP SIGCHLD SIGUSR SIGPIPE SIGALRM SIGSTOP SIGCONT SIGQUIT SIGTSTP SIGTTIN
    SIGWINCH SIG_BLOCK SIG_SETMASK pthread_ sigpending sigwait setitimer alarm pause siginterrupt""",
    select: "poll POLL",
    socket: "AF_UNIX SOCK_SEQPACKET send_fds recv_fds SCM_ SO_REUSEPORT",
    mmap: "PROT_ MAP_ MADV_",
    time: "clock_gettime clock_getres CLOCK_ pthread_getcpuclockid tzset",
}
_UNIX_MODULES = ["fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"]


class _Library:
    """The C library of macOS: it has what POSIX has, and not what only Linux has."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")


def _no_library(*_: object, **__: object) -> None:
    raise TypeError("LoadLibrary() argument 1 must be str, not None")


def _remove(names: dict[Any, str]) -> None:
    for module, text in names.items():
        for name in text.split():
            exact = name in vars(module)
            for present in [n for n in vars(module) if n == name or n.startswith(name)]:
                if present == name or ((not exact and name[-1] in "_") or name.isupper()):
                    delattr(module, present)


def _hide_files() -> None:
    def hidden(function: Any) -> Any:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(LINUX_FILES):
                raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
            return function(path, *args, **kwargs)

        return checked

    for name in ("open", "listdir", "readlink", "stat", "scandir", "lstat"):
        setattr(os, name, hidden(getattr(os, name)))
    builtins.open = io.open = hidden(io.open)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    """Do what `socket.socketpair` of Windows' Python does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def take_away(system: str) -> None:
    """Make this process as one on "darwin" or "win32". Call it before the import of zmqdist."""
    assert not any(name.split(".")[0] == "zmqdist" for name in sys.modules)
    for name in _BELOW.replace(",", " ").split():
        __import__(name)
    _remove(_BOTH)
    _hide_files()
    ctypes.CDLL = _Library if system == "darwin" else _no_library  # type: ignore[assignment,misc]
    if system == "win32":
        _remove(_WINDOWS)
        for name in _UNIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
        home: Any = sys.modules[pathlib.Path.__module__]
        home.WindowsPath = pathlib.PosixPath
        socket.socketpair = _socket_pair  # type: ignore[assignment]
        os.name = "nt"
    sys.platform = system
    # selectors and those that it chose are imported anew, without epoll
    del sys.modules["selectors"]
