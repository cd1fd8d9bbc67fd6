"""Lines of a person at a terminal, where Ctrl-C clears the line and only twice in a row leaves."""

from collections.abc import Callable

try:
    import readline  # input() then edits lines, and has a history
except ImportError:
    readline = None  # type: ignore[assignment]

PROMPT = "> "
MORE = ". "


class Prompt:
    """Reads messages from standard input."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._was_interrupted = False

    def read(self) -> str | None:
        """The next message that is not empty; None when the person leaves."""
        while True:
            try:
                text = _read_continued().strip()
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                if self._was_interrupted and not _typed():
                    return None
                self._was_interrupted = not _typed()
                if self._was_interrupted:
                    self._note("Ctrl-C once more, or Ctrl-D, to leave")
                continue
            self._was_interrupted = False
            if text:
                return text


def _read_continued() -> str:
    lines = [input(PROMPT)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(MORE))
    return "\n".join(lines)


def _typed() -> str:
    """What stands in the line that was interrupted."""
    return "" if readline is None else readline.get_line_buffer()
