"""How a rank ends before its work began: by a signal, or by a fault that no restart can cure.

Needs nothing but the standard library, so that it works whatever else does not; hence it reads torchrun's variables itself.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


MAX_LIVES = 20
"""Lives of a rank before the first that becomes ready. The core gives up earlier; this is for ranks that never reach it."""


class SignalWatch:
    """Takes this process's ending signals in a thread of its own.

    Python's handlers don't run while the main thread waits inside native code. Until ``hand_over`` a signal ends the
    process at once and without a word; afterwards each is one byte in the pipe that ``hand_over`` returned.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._handed_over = False
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def hand_over(self) -> int:
        """From now on signals are bytes in the returned descriptor."""
        self._handed_over = True
        return self._read_end

    def _watch(self) -> None:
        while True:
            number = signal.sigwait(ENDING_SIGNALS)
            if not self._handed_over:
                os._exit(128 + number)
            os.write(self._write_end, bytes((number,)))


def count_lives(error_file: str) -> int:
    """How often this rank was started since the engine was last ready, this time included.

    Kept in files beside the error file, which the core removes when an epoch is ready.
    """
    path = Path(f"{error_file}.lives-{os.environ.get('RANK', '0')}")
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


def end_everything(cause: str, error_file: str | None) -> None:
    """Say why, and end the agent: a restart would fail in the same way.

    The cause goes to the launcher's file or, without one, to standard error and to the file from which torchrun prints
    its root cause.
    """
    if error_file is not None:
        # A launcher that was stopped has cleaned up by now, and wants to hear nothing.
        with suppress(FileNotFoundError), open(error_file, "a", encoding="utf-8") as file:
            file.write(cause + "\n")
    else:
        sys.stderr.write(f"brigade: {cause}\n")
    torchrun_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if torchrun_file is not None:
        report = {"message": {"message": cause, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(torchrun_file).write_text(json.dumps(report))
    restarts = [int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT")]
    if restarts[0] > restarts[1]:
        os.kill(os.getppid(), signal.SIGTERM)
