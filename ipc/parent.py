"""How does a process end when its parent does, however that ends?"""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> bool:
    """Have the kernel signal this process when its parent ends; False when that has happened already.

    The parent's thread that started this process counts as the parent. SIGKILL also reaches a process that blocks signals
    or is stopped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == parent_pid
