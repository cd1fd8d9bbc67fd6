"""One rank as the serve script would start it: signals blocked and turned into bytes, then run_worker.

Argument: JSON of the settings that differ from the defaults. Exit code 3 stands for a ConfigError.
"""

import json
import os
import signal
import sys
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(values: dict) -> int:
    read_end, write_end = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def watch() -> None:
        while True:
            os.write(write_end, bytes((signal.sigwait(SIGNALS),)))

    threading.Thread(target=watch, daemon=True).start()

    from ipc.errors import ConfigError
    from worker.model_config import read_model_config
    from worker.settings import WorkerSettings
    from worker.worker import run_worker

    settings = WorkerSettings(
        config=read_model_config(values["model"]), parent_pid=os.getppid(), signal_fd=read_end, **values
    )
    try:
        return run_worker(settings)
    except ConfigError as error:
        sys.stderr.write(f"refused: {error}\n")
        return 3


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
