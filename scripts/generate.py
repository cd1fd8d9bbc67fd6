"""How does `brigade generate` turn prompts on the command line into requests, and outputs into text or JSON lines?"""

import json
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TextIO

import click

from engine import Client, Output
from engine.outputs import TokenLogprob
from engine.progress import BatchProgress, ProgressBar
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import PeerLost, RequestError
from scripts.exits import EXIT_REQUEST_FAILED, errors_told
from scripts.options import GroupedCommand, client_key_options
from scripts.prompt_files import Job, read_jobs
from scripts.sampling_options import sampling_options, sampling_values

MAX_OPEN_REQUESTS = 64
"""Sent ahead of the one being printed: enough to fill a batch, few enough to refuse nobody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back for one prompt, as it stands at the end."""

    output: Output | None = None
    """Of one choice; None if the request failed."""
    error: RequestError | None = None


@dataclass(slots=True, kw_only=True)
class _Printer:
    """Where answers go, and what was counted on the way."""

    as_json: bool
    file: TextIO | None = None
    """Takes the lines of JSON instead of standard output."""
    bar: ProgressBar
    num_total: int
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0

    def count_tokens(self, count: int) -> None:
        self.num_tokens += count
        self._show()

    def finish(self, index: int, job: Job, answers: Sequence[Answer], *, was_streamed: bool) -> None:
        self.num_done += 1
        self.num_failed += any(answer.error is not None for answer in answers)
        for answer in answers:
            if self.as_json:
                self._line(json.dumps(_as_record(index, job, answer), ensure_ascii=False))
            elif answer.error is not None:
                where = f"prompt {index + 1}: " if self.num_total > 1 else ""
                click.echo(f"Error: {where}{answer.error}", err=True)
            elif answer.output is not None and not was_streamed:
                click.echo(f"[{answer.output.index}] {answer.output.text}")
        self._show()

    def _line(self, text: str) -> None:
        if self.file is None:
            click.echo(text)
        else:
            self.file.write(text + "\n")
            self.file.flush()

    def _show(self) -> None:
        self.bar(BatchProgress(
            num_total=self.num_total, num_done=self.num_done, num_failed=self.num_failed, num_tokens=self.num_tokens
        ))


@click.command(name="generate", cls=GroupedCommand, context_settings={"max_content_width": 120})
@click.argument("prompts", nargs=-1)
@click.option(
    "--file",
    "files",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Read a prompt from this file, '-' for standard input. Repeatable.",
)
@click.option("--lines", is_flag=True, help="Every line that is not empty, of files and standard input, is a prompt.")
@click.option("--jsonl", is_flag=True, help="Every such line is a JSON object with a prompt or messages.")
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="Address of the engine.")
@client_key_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line instead of streaming text.")
@click.option("--output", type=click.Path(dir_okay=False, writable=True), metavar="FILE",
              help="Write these lines into a file, and show on a terminal how far it is.")
@sampling_options()
def command(
    prompts: tuple[str, ...], files: tuple[str, ...], lines: bool, jsonl: bool, connect: str,
    server_key: str | None, client_key: str | None, as_json: bool,
    output: str | None, **sampling: Any,
) -> None:  # fmt: skip
    """Ask a running engine to continue each PROMPT.

    Without a PROMPT and without --file, standard input is the prompt. The newline at its end, or at a file's, is not
    part of it. Answers come in the order of the prompts (arguments first); the text of an answer is printed as it
    arrives, with a newline behind it.

    With --jsonl each line of the input is an object with "prompt" (text, or a list of token ids) or "messages" (objects
    with role and content), and if it likes "id" (told again in the answer) and "params" (sampling parameters of
    docs/sampling.md, which win over the options).

    An answer can be made to have a form, by one of --json-schema, --json-object, --regex, --choice and --grammar; see
    docs/structured.md.

    With --n above 1 the answers to a prompt are printed when the last of them is there, each with its index in front.

    With --json each line has index, prompt (or messages), text, token_ids, finish_reason ("stop" or "length") and the seed
    in use, id and logprobs where they were asked for; or for a request that failed index, prompt and error (code, message,
    field). With --n above 1 each answer has a line of its own, with choice.

    \b
    Exit codes:
      0    every request was answered
      1    a request failed; the others were answered
      2    an option or a prompt can't be used; nothing was sent
      3    no engine at the address, or it went away
      130  interrupted; open requests were ended
    """
    with errors_told():
        if lines and jsonl:
            raise RequestError("--lines and --jsonl are two ways to read a line; give one of them")
        jobs = read_jobs(prompts, files, lines=lines, jsonl=jsonl, values=sampling_values(sampling))
        with ExitStack() as stack:
            client = stack.enter_context(Client(connect, server_key=server_key, client_key=client_key))
            file = None if output is None else stack.enter_context(open(output, "w", encoding="utf-8"))
            # Text on the same terminal would tear the bar.
            is_hidden = output is None and (not as_json or sys.stdout.isatty())
            bar = stack.enter_context(ProgressBar(len(jobs), hidden=is_hidden))
            printer = _Printer(as_json=as_json or output is not None, file=file, bar=bar, num_total=len(jobs))
            _answer_all(client, jobs, printer)
    if printer.num_failed:
        sys.exit(EXIT_REQUEST_FAILED)


def _answer_all(client: Client, jobs: Sequence[Job], printer: _Printer) -> None:
    """Print every answer in order, with the requests behind it under way already."""
    for index, (job, stream) in enumerate(_sent_ahead(client, jobs)):
        is_streamed = not printer.as_json and job.params.n == 1
        answers = [stream] if isinstance(stream, Answer) else _follow(stream, printer, streamed=is_streamed)
        printer.finish(index, job, answers, was_streamed=is_streamed)


def _sent_ahead(client: Client, jobs: Sequence[Job]) -> Iterator[tuple[Job, Iterable[Output] | Answer]]:
    """Each job with the stream of its outputs, or with an Answer when it could not even be sent."""
    under_way: deque[tuple[Job, Iterable[Output] | Answer]] = deque()
    for job in jobs:
        try:
            under_way.append((job, _send(client, job)))
        except RequestError as error:
            under_way.append((job, Answer(error=error)))
        if len(under_way) >= MAX_OPEN_REQUESTS:
            yield under_way.popleft()
    yield from under_way


def _send(client: Client, job: Job) -> Iterable[Output]:
    if job.prompt is None:
        return client.chat(job.messages or [], job.params)
    return client.generate(job.prompt, job.params)


def _follow(stream: Iterable[Output], printer: _Printer, *, streamed: bool) -> list[Answer]:
    """Read one stream to its end, or to its error; ``streamed`` prints the text of the only choice as it comes."""
    outputs: dict[int, Output] = {}
    printed = False
    failed: RequestError | None = None
    try:
        for output in stream:
            if streamed:
                click.echo(output.delta, nl=False)
                printed = printed or bool(output.delta)
            outputs[output.index] = output
            printer.count_tokens(output.num_new_tokens)
    except RequestError as error:
        failed = error
    except PeerLost:
        if printed:
            click.echo()
        raise
    if streamed and (printed or failed is None):
        click.echo()
    return [Answer(error=failed)] if failed is not None else [Answer(output=outputs[index]) for index in sorted(outputs)]


def _as_record(index: int, job: Job, answer: Answer) -> dict[str, Any]:
    record: dict[str, Any] = {"index": index, **job.as_record()}
    if answer.error is not None:
        error = answer.error
        return record | {"error": {"code": error.code, "message": str(error), "field": error.field}}
    output = answer.output
    assert output is not None
    if job.params.n > 1:
        record["choice"] = output.index
    record |= {"text": output.text, "token_ids": list(output.token_ids)}
    record |= {"finish_reason": output.finish_reason, "seed": output.seed}
    if job.params.logprobs is not None:
        record["logprobs"] = [_as_entry(entry) for entry in output.logprobs or []]
    if job.params.prompt_logprobs is not None and output.prompt_logprobs is not None:
        record["prompt_logprobs"] = [None if entry is None else _as_entry(entry) for entry in output.prompt_logprobs]
    return record


def _as_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id, "text": entry.text, "logprob": entry.logprob, "rank": entry.rank,
        "top": [list(pair) for pair in entry.top],
    }  # fmt: skip
