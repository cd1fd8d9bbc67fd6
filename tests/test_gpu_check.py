"""Does the check of GPUs compare what it says? It can't be run here but in parts, and as a whole on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from scripts import gpu_check
from scripts.gpu_check import Answer, cases_for, differences, largest_deviation, make_prompts
from tests.conftest import Checkpoints

ROOT = Path(__file__).resolve().parents[1]


def answer(*token_ids: int, gap: float = 1.0, logprob: float = -0.5) -> Answer:
    return Answer(token_ids=list(token_ids), logprobs=[logprob] * len(token_ids), gaps=[gap] * len(token_ids))


def test_which_cases_there_are() -> None:
    assert [case.name for case in cases_for("cuda", 1)] == ["CPU, gloo", "one GPU, staged, eager", "one GPU, staged"]
    assert [case.name for case in cases_for("cuda", 4)][3:] == ["two GPUs, staged", "two GPUs, NCCL"]
    assert [(case.gpus, case.flags[3]) for case in cases_for("cuda", 2)] == [
        ("", "gloo"), ("0", "staged"), ("0", "staged"), ("0,1", "staged"), ("0,1", "nccl")
    ]  # fmt: skip
    assert [case.name for case in cases_for("cuda", 2) if "none" in case.flags] == ["one GPU, staged, eager"]
    assert [case.flags[1] for case in cases_for("cpu", 0)] == ["cpu", "cpu"]


def test_a_token_may_differ_where_the_reference_hardly_preferred_its_own() -> None:
    assert differences([answer(1, 2, 3)], [answer(1, 2, 3)]) == ([], [])
    assert differences([answer(1, 2, 3)], [answer(1, 5, 3)]) == (["request 0, token 1: 5, expected 2 (gap 1.0e+00)"], [])
    # What follows such a place answers another text.
    assert differences([answer(1, 2, 3, gap=1e-4)], [answer(1, 5, 9)]) == (
        [], ["request 0, token 1: 5, expected 2 (gap 1.0e-04)"]
    )  # fmt: skip
    assert differences([answer(1, 2)], [answer(1)])[0] == ["request 0: 1 tokens, expected 2"]


def test_log_probabilities_are_compared_up_to_the_first_difference() -> None:
    other = Answer(token_ids=[1, 9, 3], logprobs=[-0.25, 7.0, 7.0], gaps=[1.0] * 3)
    assert largest_deviation([answer(1, 2, 3)], [other]) == 0.25


def test_prompts_are_the_same_for_every_case() -> None:
    assert make_prompts(300) == make_prompts(300)
    assert max(max(prompt) for prompt in make_prompts(300)) < 300


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_script_says_so() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "/no/model"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHON": sys.executable}, cwd="/",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "gpu_check: this machine has no GPU that torch can use; nothing was checked\n"


@pytest.mark.e2e
def test_the_whole_of_it_on_the_cpu(checkpoints: Checkpoints) -> None:
    done = CliRunner().invoke(gpu_check.main, [str(checkpoints.fx_r), "--device", "cpu"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.partition(";")[0] for line in lines[1:]] == ["CPU, gloo: same tokens", "CPU, staged, graphs: same tokens"]


@pytest.mark.e2e
def test_a_start_that_fails_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(gpu_check.main, [str(tmp_path), "--device", "cpu"])
    assert done.exit_code == 1
    assert "CPU, gloo: FAILED: `brigade serve" in done.output
