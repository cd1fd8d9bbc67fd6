"""How does `brigade generate` turn prompts on the command line into requests, and outputs into text or JSON lines?"""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from engine import Client, Output, SamplingParams, StructuredOutput
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import ConfigError, PeerLost, RequestError

MAX_OPEN_REQUESTS = 64
"""Sent ahead of the one being printed: enough to fill a batch, few enough to refuse nobody else's."""

EXIT_REQUEST_FAILED = 1
EXIT_BAD_USAGE = 2
EXIT_ENGINE_LOST = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one prompt, as it stands at the end."""

    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    seed: int = 0
    index: int = 0
    """Which choice it is."""
    error: RequestError | None = None


@click.command(name="generate")
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Read a prompt from this file, '-' for standard input. Repeatable.",
)
@click.option("--lines", is_flag=True, help="Every line that is not empty, of files and standard input, is a prompt.")
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="Address of the engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of streaming text.")
@click.option("--max-tokens", type=int, help="Most tokens to generate.  [default: up to the model's limit]")
@click.option("--temperature", type=float, help="0 always takes the likeliest token.  [default: the model's, else 1]")
@click.option("--top-k", type=int, help="Draw from the k likeliest tokens; 0 from all.  [default: the model's, else 0]")
@click.option("--top-p", type=float, help="Draw from the likeliest, up to this sum.  [default: the model's, else 1]")
@click.option("--n", type=int, default=1, show_default=True, help="Answers to each prompt, with seeds derived from one.")
@click.option("--seed", type=int, help="Same seed, same tokens.  [default: drawn by the engine]")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. Repeatable.")
@click.option("--stop-token-id", "stop_token_ids", multiple=True, type=int, help="End after this token. Repeatable.")
@click.option(
    "--json-schema",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The answer is JSON that fits this schema.",
)
@click.option("--json-object", is_flag=True, help="The answer is a JSON object.")
@click.option("--regex", metavar="PATTERN", help="The whole answer matches this regular expression.")
@click.option("--choice", multiple=True, metavar="TEXT", help="The answer is one of these. Repeat it for each.")
@click.option(
    "--grammar",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="The answer is of the language of this grammar, in Lark or EBNF.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's own end token.")
def command(
    prompts: tuple[str, ...],
    files: tuple[str, ...],
    lines: bool,
    connect: str,
    as_json: bool,
    json_schema: str | None,
    json_object: bool,
    regex: str | None,
    choice: tuple[str, ...],
    grammar: str | None,
    **sampling: Any,
) -> None:
    """Ask a running engine to continue each PROMPT.

    Without a PROMPT and without --file, standard input is the prompt. The newline at its end, or at a file's, is not
    part of it. Answers come in the order of the prompts (arguments first); the text of an answer is printed as it
    arrives, with a newline behind it.

    An answer can be made to have a form, by one of --json-schema, --json-object, --regex, --choice and --grammar; see
    docs/structured.md.

    With --n above 1 the answers to a prompt are printed when the last of them is there, each with its index in front.

    With --json each line has index, prompt, text, token_ids, finish_reason ("stop" or "length") and the seed in use, or
    for a request that failed index, prompt and error (code, message, field). With --n above 1 each answer has a line of
    its own, with choice.

    \b
    Exit codes:
      0    every request was answered
      1    a request failed; the others were answered
      2    an option or a prompt can't be used; nothing was sent
      3    no engine at the address, or it went away
      130  interrupted; open requests were ended
    """
    try:
        structured = None
        if json_schema or json_object or regex is not None or choice or grammar:
            structured = StructuredOutput(
                json_schema=None if json_schema is None else _read_text(json_schema),
                json_object=json_object,
                regex=regex,
                choice=choice,
                grammar=None if grammar is None else _read_text(grammar),
            )
        params = SamplingParams(**sampling, structured=structured)
        texts = _read_prompts(prompts, files, lines)
        with Client(connect) as client:
            num_failed = _answer_all(client, texts, params, as_json)
    except (PeerLost, ConfigError, RequestError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_ENGINE_LOST if isinstance(error, PeerLost) else EXIT_BAD_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if num_failed:
        sys.exit(EXIT_REQUEST_FAILED)


def _read_prompts(prompts: Sequence[str], files: Sequence[str], split_lines: bool) -> list[str]:
    """All prompts in order. Raises RequestError when there is none, or one that is not UTF-8 text."""
    if not prompts and not files:
        if sys.stdin.isatty():
            raise RequestError("no prompt: give one as an argument, with --file, or on standard input")
        files = ("-",)
    found = list(prompts)
    for name in files:
        text = _read_text(name)
        found += [line for line in text.splitlines() if line] if split_lines else [text.removesuffix("\n")]
    if not found:
        raise RequestError("no prompt: the input has no line that is not empty")
    return found


def _read_text(name: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def _answer_all(client: Client, prompts: Sequence[str], params: SamplingParams, as_json: bool) -> int:
    """Print every answer in order, with the requests behind it under way already. Returns how many failed."""
    num_failed = 0
    for index, (prompt, stream) in enumerate(_sent_ahead(client, prompts, params)):
        is_streamed = not as_json and params.n == 1
        answers = [stream] if isinstance(stream, Answer) else _follow(stream, streamed=is_streamed)
        num_failed += any(answer.error is not None for answer in answers)
        for answer in answers:
            if as_json:
                record = _as_record(index, prompt, answer, shows_choice=params.n > 1)
                click.echo(json.dumps(record, ensure_ascii=False))
            elif answer.error is not None:
                where = f"prompt {index + 1}: " if len(prompts) > 1 else ""
                click.echo(f"Error: {where}{answer.error}", err=True)
            elif not is_streamed:
                click.echo(f"[{answer.index}] {answer.text}")
    return num_failed


def _sent_ahead(
    client: Client, prompts: Sequence[str], params: SamplingParams
) -> Iterator[tuple[str, Iterable[Output] | Answer]]:
    """Each prompt with the stream of its outputs, or with an Answer when it could not even be sent."""
    under_way: deque[tuple[str, Iterable[Output] | Answer]] = deque()
    for prompt in prompts:
        try:
            under_way.append((prompt, client.generate(prompt, params)))
        except RequestError as error:
            under_way.append((prompt, Answer(error=error)))
        if len(under_way) >= MAX_OPEN_REQUESTS:
            yield under_way.popleft()
    yield from under_way


def _follow(stream: Iterable[Output], *, streamed: bool) -> list[Answer]:
    """Read one stream to its end, or to its error; ``streamed`` prints the text of the only choice as it comes."""
    answers: dict[int, Answer] = {}
    printed = False
    failed: RequestError | None = None
    try:
        for output in stream:
            if streamed:
                click.echo(output.delta, nl=False)
                printed = printed or bool(output.delta)
            answers[output.index] = Answer(
                text=output.text, token_ids=output.token_ids, finish_reason=output.finish_reason, seed=output.seed,
                index=output.index,
            )  # fmt: skip
    except RequestError as error:
        failed = error
    except PeerLost:
        if printed:
            click.echo()
        raise
    if streamed and (printed or failed is None):
        click.echo()
    return [Answer(error=failed)] if failed is not None else [answers[index] for index in sorted(answers)]


def _as_record(index: int, prompt: str, answer: Answer, *, shows_choice: bool) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, "prompt": prompt}
    if shows_choice and answer.error is None:
        record["choice"] = answer.index
    if answer.error is not None:
        error = answer.error
        return record | {"error": {"code": error.code, "message": str(error), "field": error.field}}
    token_ids = list(answer.token_ids)
    ending = {"finish_reason": answer.finish_reason, "seed": answer.seed}
    return record | {"text": answer.text, "token_ids": token_ids} | ending
