"""Which graph serves which step? Every mode, kind of step and backend, and every boundary of sizes."""

import logging
from itertools import pairwise

import pytest
import torch

from ipc.errors import ConfigError
from tests.worker.pipeline import settings_for
from worker.attention import Capabilities
from worker.graphs.choice import choose_shapes
from worker.graphs.dispatcher import BatchDescriptor, CudagraphDispatcher, Dispatch, shapes_to_capture
from worker.graphs.modes import CudagraphMode, GraphSupport, default_mode, lowered, put_right, sizes_by_rule

NONE, PIECEWISE, FULL = CudagraphMode.NONE, CudagraphMode.PIECEWISE, CudagraphMode.FULL
NEVER, DECODES, ALWAYS = GraphSupport.NEVER, GraphSupport.UNIFORM_DECODE, GraphSupport.ALWAYS

SIZES = (1, 2, 4, 8, 16, 24)
MAX_NUM_SEQS = 12


@pytest.mark.parametrize(
    ("mode", "support", "of_decodes", "of_mixed"),
    [
        ("none", NEVER, NONE, NONE),
        ("none", DECODES, NONE, NONE),
        ("none", ALWAYS, NONE, NONE),
        ("piecewise", NEVER, PIECEWISE, PIECEWISE),
        ("piecewise", DECODES, PIECEWISE, PIECEWISE),
        ("piecewise", ALWAYS, PIECEWISE, PIECEWISE),
        ("full", NEVER, PIECEWISE, PIECEWISE),
        ("full", DECODES, FULL, PIECEWISE),
        ("full", ALWAYS, FULL, FULL),
        ("full_decode_only", NEVER, PIECEWISE, PIECEWISE),
        ("full_decode_only", DECODES, FULL, NONE),
        ("full_decode_only", ALWAYS, FULL, NONE),
        ("full_and_piecewise", NEVER, PIECEWISE, PIECEWISE),
        ("full_and_piecewise", DECODES, FULL, PIECEWISE),
        ("full_and_piecewise", ALWAYS, FULL, PIECEWISE),
    ],
)
def test_what_a_mode_makes_of_each_kind_of_step(
    mode: str, support: GraphSupport, of_decodes: CudagraphMode, of_mixed: CudagraphMode
) -> None:
    shapes = shapes_to_capture(lowered(CudagraphMode(mode), support), SIZES, max_num_seqs=MAX_NUM_SEQS)
    dispatcher = CudagraphDispatcher(shapes)
    for num_tokens in range(1, 30):
        padded = next((size for size in SIZES if size >= num_tokens), None)
        for num_requests in range(1, min(num_tokens, MAX_NUM_SEQS) + 1):
            is_decode = num_tokens == num_requests
            expected = of_decodes if is_decode else of_mixed
            found = dispatcher.dispatch(num_tokens, num_requests, is_uniform_decode=is_decode)
            if padded is None or expected is NONE:
                assert found == Dispatch(NONE, BatchDescriptor(num_tokens, num_requests, is_decode))
            elif expected is PIECEWISE:
                assert found == Dispatch(PIECEWISE, BatchDescriptor(padded, None, False))
            elif is_decode:
                assert found == Dispatch(FULL, BatchDescriptor(padded, padded, True))
            else:
                assert found == Dispatch(FULL, BatchDescriptor(padded, min(padded, MAX_NUM_SEQS), False))


def test_what_is_captured_is_largest_first_and_no_more_than_can_come() -> None:
    shapes = shapes_to_capture(CudagraphMode.FULL_AND_PIECEWISE, SIZES, max_num_seqs=MAX_NUM_SEQS)
    sizes = [shape.descriptor.num_tokens for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
    # 16 is the first with room for 12 decodes.
    assert [s.descriptor.num_tokens for s in shapes if s.descriptor.is_uniform_decode] == [16, 8, 4, 2, 1]
    assert [s.descriptor.num_tokens for s in shapes if not s.descriptor.is_uniform_decode] == [24, 16, 8, 4, 2, 1]
    few = shapes_to_capture(CudagraphMode.FULL_DECODE_ONLY, (1, 4), max_num_seqs=MAX_NUM_SEQS)
    assert [s.descriptor.num_tokens for s in few] == [4, 1]
    assert shapes_to_capture(CudagraphMode.NONE, SIZES, max_num_seqs=MAX_NUM_SEQS) == []


def test_what_was_not_captured_is_served_by_a_larger_graph_or_none() -> None:
    shapes = shapes_to_capture(CudagraphMode.FULL_AND_PIECEWISE, SIZES, max_num_seqs=MAX_NUM_SEQS)
    dispatcher = CudagraphDispatcher(
        [s for s in shapes if s.descriptor.num_tokens not in ((16, 2) if s.mode is FULL else (24, 1))]
    )
    for num_tokens, size, mode in ((1, 1, FULL), (2, 4, FULL), (8, 8, FULL), (9, 16, PIECEWISE), (12, 16, PIECEWISE)):
        found = dispatcher.dispatch(num_tokens, num_tokens, is_uniform_decode=True)
        assert (found.mode, found.descriptor.num_tokens) == (mode, size)
    assert dispatcher.dispatch(17, 3, is_uniform_decode=False).mode is NONE


def test_a_step_with_more_requests_than_a_graph_has_runs_eagerly() -> None:
    dispatcher = CudagraphDispatcher(shapes_to_capture(FULL, SIZES, max_num_seqs=4))
    assert dispatcher.dispatch(16, 5, is_uniform_decode=False).mode is NONE
    assert dispatcher.dispatch(16, 4, is_uniform_decode=False).mode is FULL


def test_sizes_by_rule() -> None:
    every = sizes_by_rule(max_num_seqs=1000, max_num_batched_tokens=8192)
    assert every[:6] == (1, 2, 4, 8, 16, 24)
    assert every[-1] == 512
    steps = {b: b - a for a, b in pairwise(every)}
    assert {steps[size] for size in every if 16 <= size <= 256} == {8}
    assert {steps[size] for size in every if size > 256} == {16}


@pytest.mark.parametrize(
    ("max_num_seqs", "max_tokens", "largest"),
    [(256, 2048, 512), (16, 2048, 32), (16, 20, 16), (1, 2048, 2), (3, 2048, 4), (256, 1, 1), (200, 2048, 400)],
)
def test_sizes_by_rule_end_at_what_the_flags_allow(max_num_seqs: int, max_tokens: int, largest: int) -> None:
    assert sizes_by_rule(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens)[-1] == largest


@pytest.mark.parametrize(
    ("asked", "sizes", "notes"),
    [
        ((1, 2, 64), (1, 2, 64), []),
        ((8, 2, 2), (2, 8), ["sorted, each size once"]),
        ((1, 65, 70), (1,), ["65, 70 left out, above --max-num-batched-tokens 64"]),
        ((70, 3, 1), (1, 3), ["sorted, each size once", "70 left out, above --max-num-batched-tokens 64"]),
    ],
)
def test_a_list_of_sizes_is_put_right(asked: tuple[int, ...], sizes: tuple[int, ...], notes: list[str]) -> None:
    assert put_right(asked, max_num_batched_tokens=64) == (sizes, notes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ((), "is empty; give sizes such as 1,2,4,8, or leave the flag out"),
        ((4, 0), "0 must be at least 1"),
        ((4, -8), "-8 must be at least 1"),
        ((65, 128), "65 is above --max-num-batched-tokens 64"),
    ],
)
def test_a_list_that_cannot_be_put_right_is_refused(asked: tuple[int, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        put_right(asked, max_num_batched_tokens=64)
    assert str(caught.value) == f"--cudagraph-capture-sizes: {reason}"


class Backend:
    name = "some"

    def __init__(self, support: GraphSupport) -> None:
        self.capabilities = Capabilities(
            device_types=frozenset({"cpu"}), dtypes=frozenset({torch.float32}), graphs=support
        )


def test_a_lowered_mode_is_told_with_its_reason(checkpoints, caplog) -> None:
    caplog.set_level(logging.INFO)
    settings = settings_for(checkpoints.one_layer, cudagraph_mode="full", cudagraph_capture_sizes=(2, 4))
    shapes = choose_shapes(settings, Backend(NEVER), "cpu")
    assert {shape.mode for shape in shapes} == {PIECEWISE}
    assert caplog.messages == [
        "--cudagraph-mode full is lowered to piecewise: attention backend some supports graphs never",
        "graphs: mode piecewise (asked for), steps of up to 4 tokens in 2 sizes",
    ]


def test_auto_captures_on_a_gpu_alone(checkpoints, caplog) -> None:
    caplog.set_level(logging.INFO)
    assert default_mode("cuda") is CudagraphMode.FULL_AND_PIECEWISE
    settings = settings_for(checkpoints.one_layer)
    assert {shape.mode for shape in choose_shapes(settings, Backend(ALWAYS), "cuda")} == {PIECEWISE, FULL}
    assert choose_shapes(settings, Backend(ALWAYS), "cpu") == ()
    assert choose_shapes(settings_for(checkpoints.one_layer, cudagraph_capture_sizes=(1,)), Backend(ALWAYS), "cpu") == ()
    assert caplog.messages == [
        "graphs: mode full_and_piecewise (auto on cuda), steps of up to 16 tokens in 5 sizes",
        "--cudagraph-capture-sizes has no effect: nothing is captured",
    ]


def test_an_unknown_mode_is_refused(checkpoints) -> None:
    with pytest.raises(ConfigError, match="^--cudagraph-mode: 'fast' must be one of auto, none, piecewise"):
        settings_for(checkpoints.one_layer, cudagraph_mode="fast")
