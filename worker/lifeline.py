"""Whom does this process depend on, and how does it learn that they are gone?"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> bool:
    """Have the kernel kill this process when its parent ends; False when that has happened already.

    SIGKILL, since every other signal is blocked here and a process without a parent has nobody to tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent_pid


def watch_process(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None when it can't be seen from here."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def end_process(code: int) -> None:
    """End at once, whatever other threads are blocked in."""
    os._exit(code)
