"""Does the bench of GPU kernels count bytes and operations right, judge by its marks, and say when there is no GPU?"""

import pytest
import torch
from click.testing import CliRunner

from kernels.paged_attention import paged_attention_definition
from scripts.bench import gpu_kernels
from scripts.bench.gpu_kernels import Attention, Result


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(gpu_kernels.main)
    assert done.exit_code == 2
    assert "no GPU here" in done.output


def test_work_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "CONTEXT", 32)
    decode, prefill = (Attention(3, num_queries, torch.device("cpu")) for num_queries in (1, 32))
    assert decode.num_bytes == 3 * 32 * 2 * 8 * 128 * 2
    assert decode.num_operations == 3 * 32 * 32 * 128 * 4
    assert prefill.num_operations == 3 * (32 * 33 // 2) * 32 * 128 * 4
    for attention in (decode, prefill):
        expected = paged_attention_definition(
            attention.q, attention.cache, attention.starts, attention.lengths, attention.table, gpu_kernels.SCALE
        )
        assert torch.equal(attention.run(), expected)
        assert attention.gap() < 1e-2


@pytest.mark.parametrize(("share", "gap", "good"), [(0.81, 1e-3, True), (0.79, 1e-3, False), (0.9, 0.02, False)])
def test_marks(share: float, gap: float, good: bool) -> None:
    result = Result(name="decode", milliseconds=1, rate=1, unit="GB/s", share=share, wanted=0.8, gap=gap)
    assert gpu_kernels.passes(result) is good
    assert "wanted 80%" in gpu_kernels.line(result)
