"""What was said so far, and what can be done to it."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ipc.errors import RequestError
from ipc.params import SamplingParams

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """A system message, if there is one, and then exchanges: each a user's message and the answer."""

    system: str | None = None
    exchanges: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, *asked: str) -> list[Message]:
        """For the chat template; ``asked`` is what the user says now."""
        said: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, answer in self.exchanges:
            said += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        return said + [{"role": "user", "content": text} for text in asked]

    def undo(self) -> str | None:
        """Take the last exchange back; what the user had said in it, or None when there is none."""
        return self.exchanges.pop()[0] if self.exchanges else None

    def save(self, name: str, params: SamplingParams) -> None:
        """Write a line for `brigade generate --jsonl` into a new file. Raises RequestError."""
        line: dict[str, Any] = {"messages": self.messages()}
        if own := params.to_wire():
            line["params"] = own
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise RequestError(f"{name} is there already; choose another name") from None
        except (OSError, ValueError) as error:
            raise RequestError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
