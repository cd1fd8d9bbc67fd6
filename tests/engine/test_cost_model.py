"""Does the scheduler learn what steps cost from nothing but when they were sent and came back?"""

import json
import random
from pathlib import Path

import pytest

from engine.cost_model import Coefficients, FittedCosts, StepShape
from ipc.errors import ConfigError
from scripts.bench.pipeline import ModelledPipeline

TRUE = Coefficients(step_s=4e-3, row_s=3e-5, token_s=8e-5, attention_s=5e-9, head_s=2e-3)


def run(model: FittedCosts, num_stages: int, num_steps: int, *, seed: int = 0, jitter: float = 0.0, pauses: bool = False) -> None:
    """Steps of all sorts through a pipeline that is sometimes full and sometimes empty."""
    draw = random.Random(seed)
    pipeline = ModelledPipeline(num_stages, TRUE)
    now = 0.0
    in_flight: list[tuple[int, float]] = []
    for step_id in range(1, num_steps + 1):
        if len(in_flight) > num_stages or (in_flight and draw.random() < 0.05):
            count = len(in_flight) if draw.random() < 0.1 else 1
            for _ in range(count):
                returned, back = in_flight.pop(0)
                now = max(now, back)
                late = draw.random() * jitter + (1.0 if pauses and draw.random() < 0.02 else 0.0)
                model.returned(returned, now + late)
        shape = random_shape(draw)
        needs = step_id - num_stages if draw.random() < 0.5 else 0
        model.sent(step_id, shape, now, needs)
        in_flight.append((step_id, pipeline.send(step_id, shape, now, needs, 0.0)))


def random_shape(draw: random.Random) -> StepShape:
    rows, chunk, context = draw.randint(1, 64), draw.choice([0, 0, draw.randint(16, 1000)]), draw.randint(0, 20_000)
    attention = rows * 2 * draw.randint(100, 3000) + chunk * (2 * context + chunk)
    return StepShape(rows + (chunk > 0), rows + chunk, attention, draw.random() < 0.8)


def test_coefficients_are_found_from_sent_and_returned_alone() -> None:
    model = FittedCosts(4)
    run(model, 4, 1500)
    found = model.coefficients
    for name in ("step_s", "row_s", "token_s", "attention_s", "head_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name


@pytest.mark.parametrize("num_stages", [1, 2, 8])
def test_predictions_are_right_within_a_few_percent_despite_jitter_and_pauses(num_stages: int) -> None:
    model = FittedCosts(num_stages)
    run(model, num_stages, 1500, seed=num_stages, jitter=5e-4, pauses=True)
    draw = random.Random(9)
    for _ in range(50):
        shape = random_shape(draw)
        predicted = model.coefficients.stage_time(shape) + model.coefficients.head_s
        # A lone step of one stage takes stage time and head together: with one stage they can't be told apart.
        assert predicted == pytest.approx(TRUE.stage_time(shape) + TRUE.head_s, rel=0.15)


def test_what_prompts_cost_is_not_forgotten_while_only_decodes_run() -> None:
    model = FittedCosts(2)
    run(model, 2, 600)
    pipeline, now = ModelledPipeline(2, TRUE), 1e3
    for step_id in range(601, 3000):
        shape = StepShape(8, 8, 8 * 2 * 1000, True)
        model.sent(step_id, shape, now, 0)
        now = pipeline.send(step_id, shape, now, 0, 0.0)
        if step_id == 601:
            for open_step in sorted(model._pending)[:-1]:
                model.returned(open_step, now)
        model.returned(step_id, now)
    chunk = StepShape(1, 500, 500 * 500, False)
    assert model.coefficients.stage_time(chunk) == pytest.approx(TRUE.stage_time(chunk), rel=0.2)


def test_before_there_is_data_a_sane_guess_holds() -> None:
    model = FittedCosts(4)
    assert model.coefficients == Coefficients() and model.num_fits == 0
    assert FittedCosts(4, TRUE).coefficients == TRUE


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = FittedCosts(2)
    for step_id in range(1, 200):
        model.sent(step_id, StepShape(4, 4, 100, True), 5.0, 0)
        model.returned(step_id, 5.0)
    assert model.coefficients == Coefficients()


def test_coefficients_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"step_s": 0.001, "head_s": 0.5}))
    assert Coefficients.read(str(path)) == Coefficients(step_s=0.001, head_s=0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "can't be read as JSON"),
        ("[1]", "must hold a JSON object with keys among"),
        ('{"step": 1}', "must hold a JSON object with keys among"),
        ('{"step_s": -1}', "step_s: must be a number of seconds, at least 0, got -1"),
        ('{"row_s": "x"}', "row_s: must be a number of seconds"),
        ('{"step_s": 0, "token_s": 0}', "a step must take time"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Coefficients.read(str(path))
