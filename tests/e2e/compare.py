"""Compares what an engine generated with what the oracle says, under the gap rule."""

from collections.abc import Sequence
from typing import Any

from tests.e2e.raw import Position, RawClient, Stream, positions
from tests.oracle import LOGPROB_TOLERANCE, Excused, Greedy, check_greedy

NUM_TOP = 5


def check_against(
    client: RawClient, expected: Sequence[Greedy], *, concurrency: int, timeout_s: float = 120.0
) -> list[Excused]:
    """Run every prompt greedily and compare ids, log probabilities and counts; returns what the gap rule excused."""
    requests = [(e.prompt, greedy_params(len(e.token_ids))) for e in expected]
    streams = client.run(requests, concurrency=concurrency, timeout_s=timeout_s)
    return [found for e, stream in zip(expected, streams, strict=True) for found in check_stream(client, e, stream)]


def greedy_params(num_tokens: int) -> dict[str, Any]:
    return {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": NUM_TOP}


def check_stream(client: RawClient, expected: Greedy, stream: Stream) -> list[Excused]:
    """One finished stream that was asked for with ``greedy_params``."""
    assert stream.failed is None, stream.failed
    assert stream.finish_reason == "length"
    assert stream.num_prompt_tokens == len(expected.prompt)
    excused = check_greedy(expected, client.greedy, stream.token_ids)
    same = excused[0].position if excused else len(expected.token_ids)
    told = positions(stream.logprobs, start=len(expected.prompt))
    assert [p.token_id for p in told] == stream.token_ids
    check_top(expected.prompt_end_top, told[0])
    for index, (position, logprob) in enumerate(zip(told[:same], expected.logprobs, strict=False)):
        assert abs(position.logprob - logprob) < LOGPROB_TOLERANCE, (
            f"prompt of {len(expected.prompt)}, generated token {index}: log probability {position.logprob}, "
            f"expected {logprob}"
        )
        assert position.rank == 1
    return excused


def check_top(expected: Sequence[tuple[int, float]], position: Position) -> None:
    """The most likely tokens: equal values in order, and equal ids wherever both lists hold them."""
    assert len(position.top) >= len(expected)
    told = dict(position.top)
    for (token_id, logprob), (_, value) in zip(expected, position.top, strict=False):
        assert abs(value - logprob) < LOGPROB_TOLERANCE, f"{position.top}, expected {expected}"
        assert token_id not in told or abs(told[token_id] - logprob) < LOGPROB_TOLERANCE


def stored(entry: dict[str, Any], num_tokens: int | None = None) -> Greedy:
    """One prompt of the golden results, or the beginning of its answer."""
    return Greedy(
        prompt=entry["prompt"], token_ids=entry["token_ids"][:num_tokens], gaps=entry["gaps"][:num_tokens],
        second_ids=entry["second_ids"][:num_tokens], logprobs=entry["logprobs"][:num_tokens],
        prompt_end_top=[(i, x) for i, x in entry["prompt_end_top"]],
    )  # fmt: skip
