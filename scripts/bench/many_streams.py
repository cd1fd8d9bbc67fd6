"""Thousands of small streams at once, under a limit of open files: ``python -m scripts.bench.many_streams MODEL``

All over one HTTP server and some hundred ZeroMQ clients. Each must end with its right answer or a clean refusal; the engine's
throughput meanwhile stands beside that under a few streams, the same requests one after the other in both.
"""

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import click

from engine import Client, SamplingParams
from ipc.aclient import AsyncTokenClient
from ipc.errors import EngineError, PeerLost, RequestError
from scripts.bench.engine import Engine
from scripts.bench.http_cost import URL
from scripts.bench.results import Verdict, fail, finish, markdown, say, script_options

NUM_RIGHT = 0.75
"""Least share of streams that get their right answer; the rest is refused."""

THROUGHPUT_BAR = 0.9
"""Of what the engine does under few streams."""

DEADLINE_S = 600.0
FILES_PER_CLIENT = 12
"""Each has a ZeroMQ context of its own."""

SPARE_FILES = 64


@dataclass(slots=True)
class Tally:
    """How streams ended: "right", "wrong", "refused", or what broke."""

    ends: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    wall_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


Ask = Callable[[int], Awaitable[list[int] | None]]
"""The tokens that come back for a prompt by its number; None for a clean refusal."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("model")
@click.option("--streams", type=click.IntRange(1), default=2000, help="Over HTTP, all open at once.")
@click.option("--clients", type=click.IntRange(0), default=200, help="ZeroMQ clients, each with one stream.")
@click.option("--few", type=click.IntRange(1), default=64, help="Streams that are open at once for comparison.")
@click.option("--tokens", type=click.IntRange(1), default=16, help="Of each answer.")
@click.option("--pp", type=click.IntRange(1), default=2, help="Stages.")
@click.option("--files", type=click.IntRange(256), default=4096, help="Limit of open files of each of the engine's processes.")
@click.option("--flag", "flags", multiple=True, help="One more word for `brigade serve`; repeatable.")
@click.option("--bar", type=float, default=THROUGHPUT_BAR, help="Least share of the throughput under few streams.")
@script_options
def command(
    model: str, streams: int, clients: int, few: int, tokens: int, pp: int, files: int, flags: tuple[str, ...], bar: float,
    rounds: int, json_path: str | None, check: bool,
) -> None:  # fmt: skip
    """Print how streams ended, and tokens per second beside those under few streams."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if streams + FILES_PER_CLIENT * clients + SPARE_FILES > most_files:
        fail(f"{streams} connections and {clients} clients don't fit under the {most_files} files that this process may have")
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most_files))  # the engine inherits it
    words = [model, "--pp", str(pp), "--http", "127.0.0.1:0", "--dtype", "float32", "--max-num-seqs", str(few), *flags]
    try:
        with Engine(words) as engine:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
            found = engine.first_match(URL)
            if found is None:
                raise PeerLost("the ready line does not say where HTTP is served")
            expected = _expected(engine.address, tokens)
            runs = [asyncio.run(_measure(engine.address, found["http"], expected, streams, clients, few, number)) for number in range(rounds)]
            with Client(engine.address) as client:
                left = client.stats()
    except EngineError as error:
        fail(str(error))
    _report(runs, streams + clients, left, bar=bar, json_path=json_path, check=check)


def _report(runs: Sequence[tuple[Tally, Tally]], total: int, left: Mapping[str, object], *, bar: float, json_path: str | None, check: bool) -> None:
    rows = [
        [name, *(tally.ends[end] for end in ("right", "refused")), sum(tally.ends.values()) - tally.ends["right"] - tally.ends["refused"],
         f"{tally.wall_s:.1f}", tally.tokens_per_s]
        for few, many in runs for name, tally in (("few", few), ("many", many))
    ]  # fmt: skip
    right = min(many.ends["right"] for _, many in runs)
    clean = min(many.ends["right"] + many.ends["refused"] for _, many in runs)
    ratio = sorted(many.tokens_per_s / few.tokens_per_s for few, many in runs)[len(runs) // 2]
    verdicts = [
        Verdict(name="share of streams with their right answer", value=right / total, bar=NUM_RIGHT),
        Verdict(name="share that ended with an answer or a refusal", value=clean / total, bar=1.0),
        Verdict(name="nothing open afterwards", value=float(not left["requests_running"] and not left["requests_waiting"]), bar=1.0),
        Verdict(name="throughput, many over few", value=ratio, bar=bar),
    ]
    result = {
        "runs": [{name: {"ends": tally.ends, "tokens_per_s": tally.tokens_per_s} for name, tally in (("few", few), ("many", many))}
                 for few, many in runs]
    }  # fmt: skip
    table = markdown(["streams", "right", "refused", "else", "s", "output tokens/s"], rows)
    finish(result, table, verdicts, json_path=json_path, check=check)


def _prompt(number: int) -> list[int]:
    """One of 32, all different from the first token on, so that none has another's blocks."""
    return [10 + number % 32, *range(40, 55)]


def _expected(address: str, num_tokens: int) -> list[list[int]]:
    with Client(address) as client:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        return [list(client.generate(_prompt(number), params))[-1].token_ids for number in range(32)]


async def _measure(
    address: str, url: str, expected: list[list[int]], streams: int, clients: int, few: int, number: int
) -> tuple[Tally, Tally]:
    """Few at a time first, then all at once; HTTP's share and the clients' are the same in both."""
    num_tokens = len(expected[0])
    attached = [AsyncTokenClient(address) for _ in range(clients)]
    try:
        for client in attached:
            await client.attach()
        asks = [_over_http(url, num_tokens)] * streams + [_over_zmq(client, num_tokens) for client in attached]
        tallies = []
        for room in (few, len(asks)):
            tallies.append(await _run(asks, expected, room))
            say(f"round {number + 1}, {room} at once: {dict(tallies[-1].ends)}, {tallies[-1].tokens_per_s:.1f} tokens/s")
        return tallies[0], tallies[1]
    finally:
        for client in attached:
            await client.aclose()


async def _run(asks: Sequence[Ask], expected: list[list[int]], room: int) -> Tally:
    tally, places = Tally(), asyncio.Semaphore(room)

    async def one(number: int, ask: Ask) -> None:
        async with places:
            try:
                got = await ask(number)
            except (OSError, EngineError, ValueError, asyncio.IncompleteReadError) as error:
                tally.ends[type(error).__name__] += 1
                return
        if got is None:
            tally.ends["refused"] += 1
        else:
            tally.num_tokens += len(got)
            tally.ends["right" if got == expected[number % 32] else "wrong"] += 1

    began = time.perf_counter()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))
    tally.wall_s = time.perf_counter() - began
    return tally


def _over_http(url: str, num_tokens: int) -> Ask:
    """By bare sockets: what a client library costs is not the server's."""
    host, port = urlsplit(url).hostname, urlsplit(url).port

    async def ask(number: int) -> list[int] | None:
        fields = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        body = json.dumps({"prompt": _prompt(number), "max_tokens": num_tokens, **fields}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            status = (await reader.readuntil(b"\r\n")).split()[1]
            lines = (await reader.read()).split(b"\n")
        finally:
            writer.close()
        if status in (b"429", b"503"):
            return None
        if status != b"200" or b"data: [DONE]" not in lines:
            raise ValueError(status)
        return list(_token_ids(lines))

    return ask


def _token_ids(lines: Sequence[bytes]) -> Iterator[int]:
    for line in lines:
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                yield from choice["token_ids"]


def _over_zmq(client: AsyncTokenClient, num_tokens: int) -> Ask:
    async def ask(number: int) -> list[int] | None:
        ids: list[int] = []
        try:
            async for output in client.generate(_prompt(number), SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)):
                ids += output.new_token_ids
        except RequestError as error:
            if error.code in ("overloaded", "unavailable"):
                return None
            raise
        return ids

    return ask


if __name__ == "__main__":
    command()
