"""Do stages that replay graphs of padded steps compute what they compute without? (case C11)"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ipc.messages import ModelRunnerOutput
from kernels.panel_attention import tokens_of_panels
from tests.native import INSTRUCTION_SETS
from tests.worker.fake_graphs import FakePool
from tests.worker.pipeline import Pipeline, Plans, tokens_of
from worker.graphs.modes import CudagraphMode
from worker.graphs.stage_graphs import PaddedStep, StageGraphs, Start
from worker.model_runner import ModelRunner

MODES = ["piecewise", "full", "full_decode_only", "full_and_piecewise"]
MOST_LIVE = 33
NUM_BLOCKS = 256
BOUNDARIES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33)
"""Live requests at both sides of each size by rule."""

needs_native_code = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")


def make(path: Path, num_stages: int = 1, mode: str = "none", **changes) -> Pipeline:
    """A pipeline whose caches are full of NaN, so that who reads what it didn't write is found out."""
    pipeline = Pipeline(
        path, num_stages, num_blocks=NUM_BLOCKS, max_model_len=256, max_num_seqs=40, cudagraph_mode=mode, **changes
    )
    for runner in pipeline.runners:
        for cache in set(runner._caches.tensors):
            cache.fill_(torch.nan)
    return pipeline


def make_plans() -> Plans:
    """Block 0 is nobody's."""
    plans = Plans(num_blocks=NUM_BLOCKS)
    plans.free_blocks.remove(0)
    return plans


def live_batches(
    pipeline: Pipeline, plans: Plans, counts: tuple[int, ...] = tuple(range(1, MOST_LIVE + 1))
) -> Iterator[ModelRunnerOutput]:
    """Each number of live requests in turn: a step in which the new ones' prompts stand beside decodes, then decodes."""
    live = 0
    for count in counts:
        new = {row: 3 + row % 5 for row in range(live, count)}
        for row, length in new.items():
            plans.add(row, random.Random(row).choices(range(3, 512), k=length))
        yield pipeline.run(plans.step(new | dict.fromkeys(range(live), 1)))
        live = count
        yield pipeline.run(plans.step(dict.fromkeys(range(live), 1)))


def ids_of(outputs: Iterator[ModelRunnerOutput]) -> list[dict[int, int]]:
    ids = []
    for output in outputs:
        assert output.nan_rows == []
        ids.append(tokens_of(output))
    return ids


@pytest.fixture(scope="module")
def expected(checkpoints) -> list[dict[int, int]]:
    """Ids without graphs."""
    return ids_of(live_batches(make(checkpoints.fx_r), make_plans()))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """How many steps went each way, of all stages."""
    counted: Counter = Counter()
    execute = ModelRunner.execute_model

    def count(self, batch, received):
        if batch.plan.step_id:
            is_padded = isinstance(batch.forward, PaddedStep)
            counted[batch.forward.dispatch.mode if is_padded else CudagraphMode.NONE] += 1
        return execute(self, batch, received)

    monkeypatch.setattr(ModelRunner, "execute_model", count)
    return counted


CELLS = [
    (mode, num_stages) if num_stages == 2 or mode == MODES[-1] else pytest.param(mode, num_stages, marks=pytest.mark.slow)
    for mode in MODES for num_stages in (1, 2, 3)
]  # fmt: skip


@needs_native_code
@pytest.mark.parametrize(("mode", "num_stages"), CELLS)
def test_ids_are_those_of_eager_steps(checkpoints, expected, steps, mode: str, num_stages: int) -> None:
    pool = FakePool()
    assert ids_of(live_batches(make(checkpoints.fx_r, num_stages, mode, pool=pool), make_plans())) == expected
    chosen = CudagraphMode(mode)
    each = MOST_LIVE * num_stages
    assert steps == Counter({chosen.of_decodes: each}) + Counter({chosen.of_mixed: each})
    assert pool.replayed
    assert sorted(pool.released) == sorted(pool.captured)


@pytest.fixture(scope="module")
def expected_of_demo_model(demo_model) -> list[dict[int, int]]:
    return ids_of(live_batches(make(demo_model), make_plans(), BOUNDARIES))


@needs_native_code
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_ids_of_the_demo_model(demo_model, expected_of_demo_model, mode: str, num_stages: int) -> None:
    pipeline = make(demo_model, num_stages, mode, pool=FakePool())
    assert ids_of(live_batches(pipeline, make_plans(), BOUNDARIES)) == expected_of_demo_model


def test_a_backend_without_graph_support_runs_between_segments(checkpoints, expected, steps) -> None:
    pool = FakePool()
    pipeline = make(checkpoints.fx_r, 2, "full", attention_backend="torch", pool=pool)
    assert ids_of(live_batches(pipeline, make_plans())) == expected
    assert set(steps) == {CudagraphMode.PIECEWISE}


@needs_native_code
@pytest.mark.parametrize("mode", MODES)
def test_plain_replay_gives_the_same_ids(checkpoints, expected, mode: str) -> None:
    """As the CPU does it."""
    assert ids_of(live_batches(make(checkpoints.fx_r, 2, mode), make_plans())) == expected


@needs_native_code
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_only_the_slots_of_real_tokens_are_written(checkpoints, mode: str, num_stages: int) -> None:
    """Not a byte of block 0, of anybody else's block or of another slot changes, by a step or by a capture."""
    pipeline, plans = make(checkpoints.fx_r, num_stages, mode, pool=FakePool()), make_plans()
    head_size = 16
    caches = [cache for runner in pipeline.runners for cache in runner._caches.tensors]

    def contents() -> list[torch.Tensor]:
        return [tokens_of_panels(cache, head_size).flatten(1, 2).view(torch.int32) for cache in caches]

    before, computed = contents(), dict.fromkeys(range(MOST_LIVE), 0)
    for _ in live_batches(pipeline, plans):
        slots = {
            plans.blocks[row][position // 16] * 16 + position % 16
            for row in plans.blocks
            for position in range(computed[row], plans.computed[row])
        }
        computed |= plans.computed
        after = contents()
        for old, new in zip(before, after, strict=True):
            changed = (old != new).flatten(2).any(2)
            assert set(changed.any(0).nonzero()[:, 0].tolist()) == slots
        before = after
    assert len(caches) == 5


@needs_native_code
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_nothing_of_padding_reaches_a_real_row(checkpoints, expected, monkeypatch, mode: str) -> None:
    """Padded rows are made NaN at the first layer of each stage; tokens and logits of the others are what they were."""
    pipeline = make(checkpoints.fx_r, 2, mode, pool=FakePool())
    num_poisoned = 0
    for runner in pipeline.runners:
        poison(runner, monkeypatch)
    plans = make_plans()
    ids = []
    for output in live_batches(pipeline, plans):
        assert output.nan_rows == []
        ids.append(tokens_of(output))
    assert ids == expected
    num_poisoned = sum(runner._model.num_poisoned for runner in pipeline.runners)
    assert num_poisoned > 100


@pytest.mark.parametrize("mode", ["piecewise", pytest.param("full", marks=needs_native_code)])
def test_padding_is_computed_from_zeros(checkpoints, monkeypatch, mode: str) -> None:
    """Whatever larger steps, and other users of the receive buffers, left there."""
    padded: list[tuple[Start, int]] = []
    replay = StageGraphs.replay

    def remember(graphs, step, token_ids, received):
        outcome = replay(graphs, step, token_ids, received)
        assert torch.isfinite(outcome.hidden).all()
        source = graphs._token_ids if received is None else received
        start, _ = graphs._captured[step.dispatch, source.data_ptr()]
        padded.append((Start(*(part.clone() for part in start)), step.num_tokens))
        return outcome

    monkeypatch.setattr(StageGraphs, "replay", remember)
    pipeline = make(checkpoints.fx_r, 2, mode, cudagraph_capture_sizes=(8,), pool=FakePool())
    plans = make_plans()
    plans.add(0, range(3, 11))
    for count in (8, 1):
        pipeline.run(plans.step({0: count}))
    assert [num_tokens for _, num_tokens in padded] == [8, 8, 1, 1]
    for start, num_tokens in padded[-2:]:
        assert len(start.positions) == 8
        assert not start.source[num_tokens:].any()
        assert not start.positions[num_tokens:].any()


def poison(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    model, num_real = runner._model, []
    model.num_poisoned = 0
    begin, execute = model.begin, runner.execute_model

    def remember(batch, received):
        num_real[:] = [batch.num_tokens]
        return execute(batch, received)

    def begin_with_nan(hidden, positions):
        hidden = hidden.clone()
        hidden[num_real[0] :] = torch.nan
        model.num_poisoned += len(hidden) - num_real[0]
        return begin(hidden, positions)

    monkeypatch.setattr(runner, "execute_model", remember)
    monkeypatch.setattr(model, "begin", begin_with_nan)


@needs_native_code
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_a_rows_logits_do_not_depend_on_how_much_padding_there_is(checkpoints, mode: str) -> None:
    logits = {}
    for sizes in ((3,), (4,), (16,), (40,)):
        pipeline, plans = make(checkpoints.fx_r, 1, mode, cudagraph_capture_sizes=sizes), make_plans()
        runner = pipeline.runners[0]
        for row in range(3):
            plans.add(row, [5 + row])
        batch = runner.prepare(plans.step(dict.fromkeys(range(3), 1)))
        assert batch.forward.num_padded == sizes[0] - 3
        logits[sizes] = runner.execute_model(batch, None).logits.clone()
    for other in logits.values():
        assert torch.isfinite(other).all()
        assert (other - logits[3,]).abs().max() < 1e-4


@needs_native_code
def test_a_prompts_token_among_decodes_samples_nothing(checkpoints) -> None:
    """Every token of such a step has logits, some of which nobody wants."""
    outputs = {}
    for mode in ("none", "full"):
        pipeline, plans = make(checkpoints.fx_r, 1, mode), make_plans()
        for row, length in ((0, 4), (1, 9), (2, 5)):
            plans.add(row, random.Random(row).choices(range(3, 512), k=length))
        pipeline.run(plans.step({0: 4, 1: 7, 2: 5}))
        outputs[mode] = [tokens_of(pipeline.run(plans.step(dict.fromkeys(rows, 1)))) for rows in ((0, 1, 2), (1,), (0, 2))]
    assert outputs["full"] == outputs["none"]
    # Row 1 has two tokens of its prompt left.
    assert [sorted(tokens) for tokens in outputs["full"]] == [[0, 2], [1], [0, 2]]


@needs_native_code
def test_a_step_beyond_the_largest_size_runs_eagerly(checkpoints, expected, steps) -> None:
    pipeline = make(checkpoints.fx_r, 2, "full_and_piecewise", cudagraph_capture_sizes=(2, 6), pool=FakePool())
    assert ids_of(live_batches(pipeline, make_plans())) == expected
    assert steps[CudagraphMode.FULL] == 6 * 2
    assert steps[CudagraphMode.PIECEWISE] == 2 * 2
    assert steps[CudagraphMode.NONE] == (2 * MOST_LIVE - 8) * 2


@needs_native_code
def test_without_memory_for_all_graphs_others_serve(checkpoints, expected, steps, caplog) -> None:
    """Every third capture fails: of a size with several segments, or several buffers, one is enough."""
    pools = []

    def failing() -> FakePool:
        pools.append(FakePool(lambda number: number % 3 != 1))
        return pools[-1]

    pipeline = make(checkpoints.fx_r, 1, "full", cudagraph_capture_sizes=(1, 2, 4, 8, 16, 40), pool=failing())
    missing = "40 (full), 8 (full, decodes), 4 (full), 1 (full, decodes)"
    assert f"no memory to capture steps of {missing} tokens; they use a larger graph" in caplog.text
    assert ids_of(live_batches(pipeline, make_plans())) == expected
    assert steps[CudagraphMode.FULL] > 0
    assert pools[0].replayed


def test_without_memory_for_any_graph_steps_run_eagerly(checkpoints, expected, steps) -> None:
    pool = FakePool(lambda number: False)
    assert ids_of(live_batches(make(checkpoints.fx_r, 2, "piecewise", pool=pool), make_plans())) == expected
    assert set(steps) == {CudagraphMode.NONE}
    assert pool.replayed == []


def test_another_failure_of_a_capture_is_not_taken_for_a_lack_of_memory(checkpoints) -> None:
    def fail(number: int) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        make(checkpoints.fx_r, 1, "piecewise", pool=FakePool(fail))


@needs_native_code
def test_captures_are_largest_first_and_once_for_each_receive_buffer(checkpoints) -> None:
    pool = FakePool()
    sizes: list[int] = []
    pipeline = make(checkpoints.fx_r, 1, "piecewise", cudagraph_capture_sizes=(2, 5, 9), pool=pool)
    sizes = [graph._inputs.positions.shape[0] for graph in pool.graphs if hasattr(graph._inputs, "positions")]
    assert sizes == [9, 5, 2]
    # One more segment than layers.
    assert len(pool.graphs) == 3 * 6
    assert pipeline.runners[0]._graphs.num_graphs == 3
    second = FakePool()
    pipeline = make(checkpoints.fx_r, 2, "full_decode_only", cudagraph_capture_sizes=(2, 5, 9), pool=second)
    assert [runner._graphs.num_graphs for runner in pipeline.runners] == [3, 9]
    assert len(second.graphs) == 12
