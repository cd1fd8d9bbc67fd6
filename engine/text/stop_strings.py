"""Does the text of a stream contain a stop string, wherever the pieces are cut?"""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until a stop string is complete; holds back only what may still become one.

    The one whose last character comes first wins, and among those that end together the longest: so the result does
    not depend on how the text was cut into pieces. Cost is linear in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """With ``include`` the matched string is part of the text."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; nothing passes after it."""

    def push(self, text: str, *, heeded: bool = True) -> str:
        """The part of held and new text that may be shown now. A string that this text completes counts if ``heeded``."""
        if not self._matchers or self.matched is not None:
            return text if self.matched is None else ""
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            complete = [m.stop for m in self._matchers if m.step(pending[index])]
            if complete and heeded:
                self.matched = max(complete, key=len)
                self._held = ""
                end = index + 1
                return pending[:end] if self._include else pending[: end - len(self.matched)]
        num_held = max(matcher.num_held for matcher in self._matchers)
        self._held = pending[len(pending) - num_held :]
        return pending[: len(pending) - num_held]

    def flush(self) -> str:
        """What was held back, now that no more text will come."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """How many characters of one stop string the text ends with (Knuth, Morris, Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._shorter[length - 1]
            length += stop[index] == stop[length]
            self._shorter[index] = length

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may become the string; of a complete one, those that begin it again."""
        return self.num_matched if self.num_matched < len(self.stop) else self._shorter[-1]

    def step(self, character: str) -> bool:
        """True when the string is complete with this character."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._shorter[-1]
        while self.num_matched and character != self.stop[self.num_matched]:
            self.num_matched = self._shorter[self.num_matched - 1]
        self.num_matched += character == self.stop[self.num_matched]
        return self.num_matched == len(self.stop)
