"""Engines that the end-to-end tests share, and oracles of the tiny checkpoints."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch

from tests import tiny
from tests.conftest import Checkpoints
from tests.e2e.harness import EnginePool
from tests.oracle import Excused, Greedy, Oracle


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePool]:
    pool = EnginePool(max_alive=5)
    yield pool
    pool.close()


class TinyOracle:
    """transformers on ``fx_r``, with what it said kept for other tests."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        torch.set_num_threads(1)
        self.oracle = Oracle.of(checkpoints.fx_r)
        self._greedy = cache(self.oracle.greedy)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> Greedy:
        return self._greedy(tuple(prompt), num_tokens)

    def expect(self, seed: int, lengths: Sequence[int], num_tokens: int | Sequence[int]) -> list[Greedy]:
        """Random prompts of these lengths and their greedy continuations."""
        draw = random.Random(seed)
        counts = [num_tokens] * len(lengths) if isinstance(num_tokens, int) else num_tokens
        return [
            self.greedy(random_prompt(draw, length), count) for length, count in zip(lengths, counts, strict=True)
        ]


def random_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(tiny.FIRST_BYTE, 512) for _ in range(length)]


@pytest.fixture(scope="session")
def tiny_oracle(checkpoints: Checkpoints) -> TinyOracle:
    return TinyOracle(checkpoints)


@pytest.fixture
def excused(record_property: Callable[[str, object], None]) -> Iterator[list[Excused]]:
    """Collects the ids that the gap rule let pass; they are shown at the end of the run."""
    found: list[Excused] = []
    yield found
    for one in found:
        record_property("excused", one)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows every different id that the gap rule let pass, with its gap."""
    for report in terminalreporter.getreports(""):
        for name, one in report.user_properties:
            if name == "excused" and report.when == "teardown":
                terminalreporter.write_line(
                    f"gap rule: {report.nodeid}: generated token {one.position} is {one.got} instead of {one.expected}, "
                    f"gap {one.gap:.2g}"
                )
