"""Which of several settings is fastest? Their engines run side by side and take turns, so that all see the same machine."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from ipc.aclient import AsyncTokenClient
from scripts.bench.cases import Case, Figures, fresh_prompts, median, run_case
from scripts.bench.engine import Engine, cpu_seconds
from scripts.bench.results import say


@dataclass(slots=True, kw_only=True)
class Runs:
    """What one setting did in one case, round by round."""

    figures: list[Figures] = field(default_factory=list)
    busy_shares: list[list[float]] = field(default_factory=list)
    """Per rank, its time on a core over the round's seconds."""

    def median(self, name: str) -> float:
        """Of one of the figures."""
        return median(self.figures, name)

    def busy(self, rank: int) -> float:
        """Median share of a rank."""
        return statistics.median(shares[rank] for shares in self.busy_shares)


Results = dict[str, dict[Case, Runs]]
"""By setting and case."""


def alternate(
    settings: Mapping[str, Sequence[str]],
    cases: Sequence[Case],
    num_rounds: int,
    *,
    cores: Sequence[Sequence[int]] | None = None,
) -> Results:
    """Start an engine per setting, then run every case on each in turn; a first round only warms.

    Args:
        settings: name to the words of ``brigade serve``.
        cores: of each rank, in every engine; None lets them run anywhere.

    Raises:
        PeerLost: an engine did not start, or went away.
        RequestError: a request failed.
    """
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        partitions: dict[int, str] = {}
        for name, words in settings.items():
            given = partitions.get(_num_stages(words))
            engine = engines[name] = Engine([*words, *(("--pipeline-partition", given) if given else ())])
            stack.callback(engine.stop)
            engine.wait_ready()
            if cores is not None:
                engine.pin(cores)
            # Measured splits may differ from start to start, and would be compared along with the settings.
            partitions.setdefault(_num_stages(words), engine.partition())
            say(f"{name}: ready, layers per stage {engine.partition()}")
        return asyncio.run(_play(engines, cases, num_rounds))


def _num_stages(words: Sequence[str]) -> int:
    return int(words[words.index("--pp") + 1]) if "--pp" in words else 1


async def _play(engines: Mapping[str, Engine], cases: Sequence[Case], num_rounds: int) -> Results:
    results: Results = {name: {case: Runs() for case in cases} for name in engines}
    ranks = {name: list(engine.ranks().values()) for name, engine in engines.items()}
    names = list(engines)
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(AsyncTokenClient(engine.address, name="brigade-bench"))
            for name, engine in engines.items()
        }
        for number in range(-1, num_rounds):
            for case in cases:
                prompts = fresh_prompts(case, number, clients[names[0]].model.vocab_size)
                # Another one begins each time, so that none is always the one behind a certain other.
                for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                    before = [cpu_seconds(pid) for pid in ranks[name]]
                    figures = await run_case(clients[name], case, prompts)
                    after = [cpu_seconds(pid) for pid in ranks[name]]
                    if number >= 0:
                        runs = results[name][case]
                        runs.figures.append(figures)
                        runs.busy_shares.append([(b - a) / figures.seconds for a, b in zip(before, after, strict=True)])
                        say(f"round {number + 1} of {num_rounds}, {case}, {name}: {figures.output_tok_s:.1f} tokens/s")
    return results


def as_json(results: Results) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        name: {
            str(case): {"figures": [asdict(one) for one in runs.figures], "busy_shares": runs.busy_shares}
            for case, runs in cases.items()
        }
        for name, cases in results.items()
    }
