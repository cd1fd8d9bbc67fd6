"""torchrun for ``brigade serve``: the same agent, quiet, and gone when its launcher is gone.

Its own log and tracebacks say nothing that a user could act on; the cause of a failure comes from the ranks and the core,
through the launcher's error file.
"""

import ctypes
import logging
import os
import shutil
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run torchrun with this process's arguments; the first two are the launcher's pid and its directory."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    launcher_pid, directory = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if os.getppid() != launcher_pid:
            return 1
        logging.disable(logging.CRITICAL)
        run(parse_args(sys.argv[3:]))
    except SignalException as ended:
        return 128 + ended.sigval
    except ChildFailedError:
        return 1
    finally:
        if os.getppid() != launcher_pid:
            # It was killed, so nobody else will.
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
