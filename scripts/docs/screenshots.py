"""Makes the pictures of docs/ from a real run: docs/top.svg and docs/timeline.png.

    python -m scripts.docs.screenshots MODEL [--pp 2]

Needs what [ui] and [bench] install.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from engine import Client, SamplingParams
from scripts.bench.engine import Engine

DOCS = Path(__file__).resolve().parents[2] / "docs"
NUM_STREAMS = 12
SETTLE_TOKENS = 40
"""Of each stream before pictures are made: a picture of the first prompts alone would mislead."""

PROMPTS = (
    "Once upon a time there was a lighthouse keeper who", "The three primary colors are", "A recipe for bread begins with",
    "The history of the bicycle, told in a few words:",
)  # fmt: skip


@click.command()
@click.argument("model")
@click.option("--pp", type=click.IntRange(1), default=2, show_default=True, help="Stages.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=DOCS, show_default="docs", help="Where they go.")
def main(model: str, pp: int, folder: Path) -> None:
    """Serve MODEL, load it, and draw what `brigade top` and `brigade timeline` show of it."""
    words = [model, "--pp", str(pp), "--kv-cache-memory", "256MiB", "--speculative-lookup-tokens", "4"]
    with Engine(words) as engine, Client(engine.address) as client, _load(client):
        _brigade("top", engine.address, "--interval", "3", "--svg", str(folder / "top.svg"))
        _brigade("timeline", engine.address, "--png", str(folder / "timeline.png"))
    click.echo(f"wrote {folder / 'top.svg'} and {folder / 'timeline.png'}")


@contextmanager
def _load(client: Client) -> Iterator[None]:
    """Streams that go on until the block is left; it begins when each of them has some tokens."""
    is_over, under_way = threading.Event(), threading.Barrier(NUM_STREAMS + 1)
    threads = [
        threading.Thread(target=_stream, args=(client, number, is_over, under_way), daemon=True) for number in range(NUM_STREAMS)
    ]
    for thread in threads:
        thread.start()
    try:
        under_way.wait(300)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)


def _stream(client: Client, number: int, is_over: threading.Event, under_way: threading.Barrier) -> None:
    has_told, turn = False, 0
    while not is_over.is_set():
        turn += 1
        prompt = PROMPTS[number % len(PROMPTS)] + " " * turn
        params = SamplingParams(max_tokens=150 + 40 * number, ignore_eos=True, seed=number)
        with client.generate(prompt, params, f"request-{number}-{turn}") as stream:
            for output in stream:
                if not has_told and len(output.token_ids) >= SETTLE_TOKENS:
                    has_told = True
                    under_way.wait(300)
                if is_over.is_set():
                    return


def _brigade(*words: str) -> None:
    command: Sequence[str] = [sys.executable, "-m", "scripts.cli", *words]
    subprocess.run(command, check=True, timeout=120)


if __name__ == "__main__":
    main()
