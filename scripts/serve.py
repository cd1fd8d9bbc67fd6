"""One rank, as torchrun starts it: ``torchrun --nproc-per-node N -m scripts.serve MODEL [flags]``.

A small first step before anything slow is imported: signals are taken over, and whatever fails from here on is told where
people look for it.
"""

import logging
import os
import sys
from traceback import format_exception

from scripts.ending import MAX_LIVES, SignalWatch, count_lives, end_everything

USAGE_ERROR = 2


def main() -> None:
    """Be a rank; does not return."""
    signals = SignalWatch()
    files = [word.partition("=")[2] for word in sys.argv if word.startswith("--error-file=")]
    error_file = files[0] if files else None
    rank = f"rank {os.environ.get('RANK', '?')}"
    if error_file is not None and count_lives(error_file) > MAX_LIVES:
        end_everything(f"{rank}: started {MAX_LIVES} times without becoming ready", error_file)
        sys.exit(1)
    try:
        from scripts.rank import command

        command(prog_name="scripts.serve", obj=signals)
    except Exception as error:  # noqa: BLE001 the top of a process: said, and passed on
        logging.getLogger(__name__).error("%s could not start\n%s", rank, "".join(format_exception(error, limit=-6)))
        end_everything(f"{rank}: {type(error).__name__}: {error}", error_file)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == USAGE_ERROR:
            end_everything(f"{rank}: wrong usage, see above", error_file)
        raise


if __name__ == "__main__":
    main()
