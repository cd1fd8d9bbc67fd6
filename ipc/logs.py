"""How log lines look: one line per event, with the process that says it."""

import logging
import signal
import sys

LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(who: str, level: str) -> None:
    """Log to standard error; ``who`` ("core", "rank 1") stands in every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s brigade {who}: %(message)s", datefmt="%H:%M:%S"))
    # Whoever read standard error may be gone; that is no reason to fail, nor to say so there.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def signal_name(number: int) -> str:
    """A signal as the person who sent it would call it."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
