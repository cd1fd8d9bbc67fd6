"""What is `brigade generate` to ask: prompts of the command line, of files, and of JSON lines."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipc.errors import RequestError
from ipc.params import SamplingParams
from scripts.sampling_options import DEFAULTS, of_json, read_text

KEYS = ("id", "messages", "params", "prompt")
"""What an object of a JSON line may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to send."""

    prompt: str | list[int] | None
    """Text or token ids; None when there are messages."""
    messages: list[Any] | None = None
    params: SamplingParams
    id: str | int | None = None
    """What its line of JSON calls it; the answer's has it too."""

    def as_record(self) -> dict[str, Any]:
        """What an answer repeats of it."""
        record: dict[str, Any] = {} if self.id is None else {"id": self.id}
        return record | ({"messages": self.messages} if self.prompt is None else {"prompt": self.prompt})


def read_jobs(
    prompts: Sequence[str], files: Sequence[str], *, lines: bool, jsonl: bool, values: Mapping[str, Any]
) -> list[Job]:
    """All in order, arguments first; without any and without files, standard input.

    Args:
        lines: every line of a file that is not empty is a prompt.
        jsonl: every such line is an object with ``prompt`` (text or token ids) or ``messages``, and if it likes ``id``
            and ``params``.
        values: arguments for SamplingParams that the params of a line win over.

    Raises:
        RequestError: there is none, or one that can't be used; naming file and line.
    """
    params = SamplingParams(**values)
    jobs = [Job(prompt=prompt, params=params) for prompt in prompts]
    if not prompts and not files:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give one as an argument, with --file, or on standard input")
        files = ("-",)
    for name in files:
        text = read_text(name, dash_is_stdin=True)
        if jsonl:
            jobs += _json_lines(name, text, values)
        else:
            found = [line for line in text.splitlines() if line] if lines else [text.removesuffix("\n")]
            jobs += [Job(prompt=prompt, params=params) for prompt in found]
    if not jobs:
        raise RequestError("no prompt: the input has no line that is not empty")
    return jobs


def _json_lines(name: str, text: str, values: Mapping[str, Any]) -> Iterator[Job]:
    # Not splitlines: JSON text may hold other line separators than these.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield _job_of(line, values)
            except RequestError as error:
                raise RequestError(f"{name}:{number}: {error}", field=error.field) from None


def _job_of(line: str, values: Mapping[str, Any]) -> Job:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError(f"must be an object with prompt or messages, got {type(data).__name__}")
    for key in data:
        if key not in KEYS:
            raise RequestError(f"{key[:64]!r} is not known; an object has {', '.join(KEYS)}", field=key)
    prompt, messages, label = data.get("prompt"), data.get("messages"), data.get("id")
    if (prompt is None) == (messages is None):
        raise RequestError("must have either prompt or messages", field="prompt")
    if not isinstance(prompt, str | list | None):
        raise RequestError(f"prompt={prompt!r:.80} must be a text or a list of token ids", field="prompt")
    if messages is not None and not isinstance(messages, list):
        raise RequestError(f"messages={messages!r:.80} must be a list of objects with role and content", field="messages")
    if type(label) not in (str, int, type(None)):
        raise RequestError(f"id={label!r:.80} must be a text or an integer", field="id")
    return Job(prompt=prompt, messages=messages, id=label, params=_params_of(data.get("params") or {}, values))


def _params_of(own: Any, values: Mapping[str, Any]) -> SamplingParams:
    if not isinstance(own, dict):
        raise RequestError(f"params={own!r:.80} must be an object of sampling parameters", field="params")
    for key in own:
        if key not in DEFAULTS:
            raise RequestError(f"params.{key[:64]} is not a sampling parameter", field="params")
    both = {**values, **{key: of_json(key, value) for key, value in own.items()}}
    return SamplingParams(**{key: value for key, value in both.items() if value is not None})
