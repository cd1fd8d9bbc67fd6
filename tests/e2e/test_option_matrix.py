"""Do options work together, for one stage and for two; or does the start say which do not? (U5)"""

import itertools
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.conftest import Checkpoints
from tests.e2e.compare import check_against
from tests.e2e.conftest import TinyOracle
from tests.e2e.harness import fail_to_start, serve
from tests.oracle import Excused

pytestmark = pytest.mark.e2e

AXES: tuple[tuple[str, ...], ...] = (
    ("--prefix-caching", "--no-prefix-caching"),
    ("--async-scheduling", "--no-async-scheduling"),
    ("--speculative-lookup-tokens=0", "--speculative-lookup-tokens=4"),
    ("--scheduling-policy=fcfs", "--scheduling-policy=priority"),
    ("--transport=auto", "--transport=staged"),
    ("--attention-backend=auto", "--attention-backend=torch"),
    ("--cudagraph-mode=auto", "--cudagraph-mode=full_and_piecewise"),
    ("--pipeline-partition=auto", "--pipeline-partition=even"),
    ("--block-size=16", "--block-size=32"),
    ("--max-num-batched-tokens=2048", "--max-num-batched-tokens=16 --max-num-seqs=8"),
    ("--prefill-share=0.62", "--prefill-share=1"),
    ("--num-kv-blocks=128", "--kv-cache-memory=4MiB"),
    ("--generation-config=auto", "--generation-config=none"),
    ("--max-queued-requests=4096", "--max-queued-requests=16"),
    ("--log-level=info", "--http=127.0.0.1:0"),
)
"""The default of each option, and what else it can be."""

Cell = tuple[str, ...]


def covering() -> Iterator[Cell]:
    """Cells such that any two values of two options meet in one of them, each as full of new pairs as can be found."""
    missing = {
        frozenset(pair) for one, other in itertools.combinations(AXES, 2) for pair in itertools.product(one, other)
    }
    while missing:
        chosen: list[str] = sorted(next(iter(sorted(missing, key=sorted))))
        for axis in AXES:
            if not set(axis) & set(chosen):
                chosen.append(max(axis, key=lambda value: sum(frozenset((value, other)) in missing for other in chosen)))
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen, 2)}
        yield tuple(next(value for value in axis if value in chosen) for axis in AXES)


def words(cell: Sequence[str]) -> list[str]:
    return ["--dtype=float32", *(word for value in cell for word in value.split())]


def test_u5_every_two_options_meet() -> None:
    cells = list(covering())
    met = {frozenset(pair) for cell in cells for pair in itertools.combinations(cell, 2)}
    assert all(frozenset((a, b)) in met for one, other in itertools.combinations(AXES, 2) for a in one for b in other)
    assert len(cells) < 20


ALL_OTHERS = tuple(axis[-1] for axis in AXES)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("cell", [ALL_OTHERS, *(pytest.param(cell, marks=pytest.mark.slow) for cell in covering())])
def test_u5_options_together_give_right_answers(
    cell: Cell, pp: int, checkpoints: Checkpoints, tiny_oracle: TinyOracle, excused: list[Excused]
) -> None:
    expected = tiny_oracle.expect(5, [5, 16, 40, 77, 120], 24)
    with serve(checkpoints.fx_r, pp=pp, flags=words(cell)) as engine:
        excused += check_against(engine.raw, expected, concurrency=5)
        excused += check_against(engine.raw, expected[::-1], concurrency=2)  # warm, and in another batch
        engine.settle()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, pattern",
    [
        (["--tensor-parallel-size=2"], "--tensor-parallel-size.*2.*use 1"),
        (["--pipeline-partition=1,1,3"], "--pipeline-partition"),
        (["--transport=nccl"], "--transport|nccl"),
        (["--attention-backend=no-such"], "--attention-backend"),
        (["--device=cuda"], "--device|CUDA|cuda"),
        (["--max-num-batched-tokens=8", "--max-num-seqs=16"], "--max-num-batched-tokens"),
        (["--speculative-lookup-tokens=99"], "--speculative-lookup-tokens"),
        (["--api-key=x"], "--api-key.*--http"),
        (["--block-size=3"], "--block-size"),
    ],
)
@pytest.mark.parametrize("pp", [1, 2])
def test_u5_what_does_not_work_is_refused_with_the_reason(
    flags: list[str], pattern: str, pp: int, checkpoints: Checkpoints
) -> None:
    if pp == 1 and flags == ["--transport=nccl"]:
        pytest.skip("one stage has nobody to send to, whatever the transport")
    failure = fail_to_start(checkpoints.fx_r, pp=pp, flags=flags, within_s=10)
    assert failure.exit_codes in ([1], [2]) and "Traceback" not in failure.text
    assert re.search(pattern, failure.text), failure.text
