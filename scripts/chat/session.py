"""One turn of a chat: a message goes out, the answer streams in, and whatever goes wrong leaves the conversation whole."""

import sys
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any, TextIO

from engine import Client, Output
from ipc.errors import PromptTooLong, RequestError
from ipc.params import SamplingParams
from scripts.chat.conversation import Conversation
from scripts.sampling_options import value_of_text
from scripts.terminal_text import printable

NOT_IN_CHAT = ("n", "echo", "logprobs", "prompt_logprobs", "logprobs_mode")
"""Sampling parameters that tell what a chat does not show."""


class Outcome(Enum):
    """How a turn ended."""

    ANSWERED = auto()
    STOPPED = auto()
    """By Ctrl-C; what was said stays, and without a word of it the message is taken back."""
    FAILED = auto()
    """The message is taken back."""


class Session:
    """The conversation with one engine."""

    def __init__(
        self, client: Client, conversation: Conversation, values: Mapping[str, Any], *, note: Callable[[str], None],
        out: TextIO | None = None,
    ) -> None:  # fmt: skip
        """``values``: arguments for SamplingParams. ``note`` shows a line about an answer. Raises RequestError."""
        self.client = client
        self.conversation = conversation
        self.params = SamplingParams(**values)
        self._values = dict(values)
        self._note = note
        self._out = sys.stdout if out is None else out

    def say(self, text: str) -> Outcome:
        """Ask, and print the answer as it comes. Raises PeerLost; then the message is taken back too."""
        last: Output | None = None
        try:
            with self.client.chat(self.conversation.messages(text), self.params) as stream:
                for last in stream:
                    self._write(last.delta)
        except KeyboardInterrupt:
            return self._stopped(text, last)
        except PromptTooLong as error:
            self._note(_what_to_do(f"the conversation has {error.num_tokens} tokens and the context holds {error.limit}"))
            return Outcome.FAILED
        except RequestError as error:
            self._end_line(last)
            self._note(f"failed: {error}; your message was taken back")
            return Outcome.FAILED
        except BaseException:
            self._end_line(last)
            raise
        self._end_line(last)
        assert last is not None
        self.conversation.exchanges.append((text, last.text))
        self._note_early_end(last)
        return Outcome.ANSWERED

    def set_param(self, name: str, text: str) -> None:
        """Change a sampling parameter; an empty text takes it back to its default. Raises RequestError."""
        if name in NOT_IN_CHAT:
            raise RequestError(f"{name} can't be set in a chat", field=name)
        values = {**self._values}
        value = value_of_text(name, text or "none")
        if text.strip().lower() in ("", "none", "null"):
            values.pop(name, None)
        else:
            values[name] = value
        self.params = SamplingParams(**values)
        self._values = values

    def _stopped(self, text: str, last: Output | None) -> Outcome:
        self._end_line(last)
        if last is None or not last.text:
            self._note("stopped before the first word; your message was taken back")
            return Outcome.STOPPED
        self.conversation.exchanges.append((text, last.text))
        self._note("stopped; /undo takes the exchange back")
        return Outcome.STOPPED

    def _note_early_end(self, last: Output) -> None:
        used, limit = last.usage.prompt_tokens + last.usage.completion_tokens, self.client.model.max_model_len
        if last.finish_reason == "length" and used >= limit:
            self._note(_what_to_do(f"the context of {limit} tokens is full: the answer was cut"))
        elif last.finish_reason == "length":
            self._note(f"cut at max_tokens={self.params.max_tokens}")
        elif last.finish_reason != "stop":
            self._note(f"ended by the engine: {last.finish_reason}")

    def _write(self, text: str) -> None:
        self._out.write(printable(text) if self._out.isatty() else text)
        self._out.flush()

    def _end_line(self, last: Output | None) -> None:
        if last is not None:
            self._write("\n")


def _what_to_do(what: str) -> str:
    return (
        f"{what}. /undo takes the last exchange back, /reset begins anew; or serve the model with a larger --max-model-len, "
        "if it was made for one"
    )
