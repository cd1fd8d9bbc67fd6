"""Tokens arrive one by one; which text may be shown now, and never has to be taken back?

The cost of a token does not depend on how many came before it.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

CUT = "\ufffd"
"""Stands for bytes that form no character."""

MAX_HELD = 3
"""A character has at most four bytes, so at most three of an unfinished one are held back."""

WINDOW_CONTEXT = 8
WINDOW_LIMIT = 32
"""Tokens; a window that grew to the limit is cut down to the context."""


class Detokenizer(Protocol):
    """One stream of tokens becoming text; the pieces joined are the whole text."""

    def add(self, token_id: int) -> str:
        """Text that is certain with this token; bytes of an unfinished character are held back."""

    def flush(self) -> str:
        """What was held back, with U+FFFD for what stayed unfinished. The stream is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the tokens of a tokenizer join to text, apart from being bytes in a row."""

    is_byte_level: bool = False
    """Tokens are spelled in the byte alphabet."""

    has_byte_tokens: bool = False
    """Tokens such as <0xE4> stand for one byte each; each byte that forms no character becomes one U+FFFD."""

    num_blanks_stripped: int = 0
    """So many spaces are taken away at the start of the text."""

    drops_blanks_of_first_token: bool = False
    """Spaces in the first token of the text do not count."""


def _one_mark_per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return CUT * (error.end - error.start), error.end


codecs.register_error("brigade.each_byte", _one_mark_per_byte)


class ByteDetokenizer:
    """For tokenizers whose tokens are byte strings: decodes UTF-8 as it comes.

    Equal to the tokenizers library's decode of all tokens at once, with one exception: where a run of byte tokens
    (has_byte_tokens) is broken anywhere, the library gives up its whole characters too.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: Collection[int], rules: TextRules) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        errors = "brigade.each_byte" if rules.has_byte_tokens else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._num_blanks_to_strip = rules.num_blanks_stripped
        self._drops_blanks = rules.drops_blanks_of_first_token

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        raw = self._token_bytes(token_id)
        if self._drops_blanks and raw:
            self._drops_blanks = False
            raw = raw.replace(b" ", b"")
        return self._stripped(self._utf8.decode(raw))

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._num_blanks_to_strip and text:
            if text[0] != " ":
                self._num_blanks_to_strip = 0
            else:
                self._num_blanks_to_strip -= 1
                text = text[1:]
        return text


class WindowDetokenizer:
    """For any other tokenizer: decodes the last few tokens together and sends what was not sent.

    The last U+FFFD characters of a text may be an unfinished character, so up to three are held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: Collection[int] = ()) -> None:
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._num_sent = 0

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        delta = self._send(text, len(text) - min(MAX_HELD, len(text) - len(text.rstrip(CUT))))
        if len(self._window) >= WINDOW_LIMIT:
            num_held = max(0, len(text) - self._num_sent)
            self._window = self._window[-WINDOW_CONTEXT:]
            self._num_sent = max(0, len(self._decode(self._window)) - num_held)
        return delta

    def flush(self) -> str:
        text = self._decode(self._window)
        return self._send(text, len(text))

    def _send(self, text: str, end: int) -> str:
        """The offset up to which text was sent never goes back, whatever the decoder makes of later tokens."""
        if end <= self._num_sent:
            return ""
        delta = text[self._num_sent : end]
        self._num_sent = end
        return delta
