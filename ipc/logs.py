"""How log lines look: one line per event, with the process that says it."""

import logging
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
