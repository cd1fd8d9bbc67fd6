"""What does speculation by lookup bring? ``python -m scripts.bench.lookup MODEL``

Two engines side by side, with and without it, answer the same requests in turn, one request at a time.
"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import click

from engine import Client, SamplingParams
from ipc.errors import EngineError
from scripts.bench.engine import Engine
from scripts.bench.results import Verdict, fail, finish, markdown, say, script_options

REPEATING_BAR, RANDOM_BAR = 1.5, 0.95

CODE = '''def read_settings(path):
    settings = {}
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings


def write_settings(path, settings):
    with open(path, "w") as file:
        for name, value in settings.items():
            file.write(name + "=" + value + "\\n")
'''

ARTICLE = """The lighthouse on Crow Island was built in 1871 by masons from the mainland. For ninety years a keeper lit the lamp
every evening and wrote the weather into a book. "The sea is calm, and there is nothing to report," says the entry of the
third of May 1898, the day before the great storm. In 1961 the lamp was made electric, and the last keeper, Ada Morgan, left
the island. "I counted the steps each morning, and there were always two hundred and twelve," she told the newspaper. Today
the lighthouse is a museum, and every visitor may climb the two hundred and twelve steps."""

TEXTS = {
    "code to edit": f"Rename the variable settings to options in this code. Answer with the whole code.\n\n```python\n{CODE}```",
    "code to copy": f"Repeat this code exactly, without any change.\n\n```python\n{CODE}```",
    "summary with quotes": f"Sum up this text, and quote its important sentences word for word.\n\n{ARTICLE}",
}
"""Answers repeat their prompts."""

RANDOM = "random text"
STORY = "Write a long story about a letter that came too late."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One request's."""

    token_ids: list[int]
    tokens_s: float
    """Behind the first token."""
    num_drafts: int
    num_accepted: int


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--stages", type=click.IntRange(1), default=2)
@click.option("--dtype", default="bfloat16")
@click.option("--lookup-tokens", type=click.IntRange(1), default=8, help="As --speculative-lookup-tokens of the one engine.")
@click.option("--output-tokens", type=click.IntRange(2), default=160, help="Most of each answer.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve` of both; repeatable.")
@script_options
def command(
    model: str, stages: int, dtype: str, lookup_tokens: int, output_tokens: int, flags: tuple[str, ...], rounds: int,
    json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print the tokens per second of one request with and without speculation, for text that repeats and text that doesn't."""
    words = [model, "--pp", str(stages), "--dtype", dtype, *flags]
    try:
        results = _measure(words, lookup_tokens, output_tokens, rounds)
    except EngineError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    rows, verdicts = [], []
    for name, pairs in results.items():
        with_drafts, without = (statistics.median(pair[i].tokens_s for pair in pairs) for i in (0, 1))
        # Rounds see other texts, so a ratio is of one round.
        ratio = statistics.median(first.tokens_s / second.tokens_s for first, second in pairs)
        drafted, accepted = (sum(getattr(pair[0], of) for pair in pairs) for of in ("num_drafts", "num_accepted"))
        num_equal = sum(first.token_ids == second.token_ids for first, second in pairs)
        rows.append([name, with_drafts, without, f"{ratio:.2f}", drafted, f"{accepted / max(drafted, 1):.0%}",
                     f"{num_equal} of {len(pairs)}"])
        verdicts.append(Verdict(name=name, value=ratio, bar=RANDOM_BAR if name == RANDOM else REPEATING_BAR))
    columns = ["text", "tokens/s with", "without", "ratio", "drafts", "accepted", "equal answers"]
    json = {name: [[asdict(first), asdict(second)] for first, second in pairs] for name, pairs in results.items()}
    finish({"results": json}, markdown(columns, rows), verdicts, json_path=json_path, check=check)


def _measure(
    words: Sequence[str], lookup_tokens: int, output_tokens: int, rounds: int
) -> Mapping[str, list[tuple[Answer, Answer]]]:
    """By text, for each round the answers with and without speculation."""
    results: dict[str, list[tuple[Answer, Answer]]] = {name: [] for name in (*TEXTS, RANDOM)}
    with ExitStack() as stack:
        clients: list[Client] = []
        given: list[str] = []
        for extra in (["--speculative-lookup-tokens", str(lookup_tokens)], []):
            engine = stack.enter_context(Engine([*words, *extra, *given]))
            # Measured splits may differ from start to start, and would be compared along with the settings.
            given = ["--pipeline-partition", engine.partition()]
            clients.append(stack.enter_context(Client(engine.address)))
        say("engines ready")
        for number in range(-1, rounds):
            for name in results:
                order = (0, 1) if number % 2 else (1, 0)
                found = {side: _ask(clients[side], name, output_tokens, number) for side in order}
                if number >= 0:
                    # The round before the first one warms.
                    results[name].append((found[0], found[1]))
                    say(f"round {number + 1} of {rounds}, {name}: {found[0].tokens_s:.1f} against {found[1].tokens_s:.1f} tokens/s")
    return results


def _ask(client: Client, name: str, output_tokens: int, number: int) -> Answer:
    is_random = name == RANDOM
    params = SamplingParams(
        temperature=1.0 if is_random else 0.0, seed=number + 2, max_tokens=output_tokens, ignore_eos=is_random
    )
    before = client.stats()
    token_ids: list[int] = []
    started, num_first = 0.0, 0
    for output in client.chat([{"role": "user", "content": STORY if is_random else TEXTS[name]}], params):
        token_ids = output.token_ids
        if not num_first:
            started, num_first = time.perf_counter(), len(token_ids)
    seconds = time.perf_counter() - started
    after = client.stats()
    drafted, accepted = (int(after[key]) - int(before[key]) for key in ("draft_tokens_total", "accepted_draft_tokens_total"))
    return Answer(
        token_ids=token_ids, tokens_s=(len(token_ids) - num_first) / seconds, num_drafts=drafted, num_accepted=accepted
    )


if __name__ == "__main__":
    command()
