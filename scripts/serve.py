"""One rank, as torchrun starts it: ``torchrun --nproc-per-node N -m scripts.serve MODEL [flags]``.

A small first step before anything slow is imported: signals are taken over, and whatever fails from here on is told where
people look for it.
"""

import logging
import os
import sys

from scripts.ending import SignalWatch, end_everything


def main() -> None:
    """Be a rank; does not return."""
    signals = SignalWatch()
    try:
        from scripts.rank import command

        command(prog_name="scripts.serve", obj=signals)
    except Exception as error:
        logging.getLogger(__name__).exception("this rank could not start")
        files = [word.partition("=")[2] for word in sys.argv if word.startswith("--error-file=")]
        rank = os.environ.get("RANK", "?")
        end_everything(f"rank {rank}: {type(error).__name__}: {error}", files[0] if files else None)
        sys.exit(1)


if __name__ == "__main__":
    main()
