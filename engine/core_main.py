"""The core's process: ``python -m engine.core_main RUN_DIR``, started by the first rank with its settings on stdin.

It holds the run directory's lock (an inherited descriptor) from before its first line to its death, and says on standard
output, in one JSON line, where workers reach it or why it can't start.
"""

import gc
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from engine.config import unpack_start
from engine.core import EngineCore
from ipc.endpoints import RunDirectory
from ipc.errors import ConfigError
from ipc.logs import set_up_logging
from ipc.promptness import ask_for_promptness


def main() -> int:
    """Start, report, serve; returns the exit code."""
    try:
        config, files = unpack_start(sys.stdin.buffer.read())
    except ValueError:
        # The rank ended while it wrote: nobody waits for this core.
        return 1
    set_up_logging("core", config.log_level)
    ask_for_promptness()
    directory = RunDirectory(path=Path(config.run_dir))
    try:
        core = EngineCore(config, files)
    except ConfigError as error:
        directory.remove()
        _report({"field": error.field, "error": error.message})
        return 1
    found = {"pid": os.getpid(), "worker_address": core.worker_address, "key": config.key}
    _write_atomically(directory.core_file, json.dumps(found))
    _report(found)
    # What was loaded stays: without it the collector has little to look through.
    gc.collect()
    gc.freeze()
    return core.run()


def _report(answer: dict[str, object]) -> None:
    # The rank that waits for this may have been ended meanwhile; the core then ends with the agent, without a word.
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
    # The reader may go away; nothing else may be written there.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
