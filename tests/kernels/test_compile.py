"""Do the Triton kernels compile for GPUs that are not here, and do their registers suffice?

In processes of their own: here triton interprets.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton", reason="triton is not installed here")


def compiled(cache: Path, *words: str, timeout_s: float = 150) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.compile_kernels", "--json", *words],
        cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    if done.returncode == 2:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_decode_kernel_compiles_and_does_not_spill(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--only", "decode", "--case", "Llama 3 8B, bf16, in parts")
    assert [one["capability"] for one in found] == [80, 90, 100]
    for one in found:
        assert one["spill_bytes"] == 0
        # Three blocks of threads at least find room on a multiprocessor: 65,536 registers, and 164 KiB on the smallest.
        assert one["registers"] * one["num_threads"] * 3 <= 65536
        assert one["shared_bytes"] * 3 <= 164 << 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels_compile_and_none_spills(tmp_path: Path) -> None:
    found = compiled(tmp_path, timeout_s=850)
    assert len({one["kernel"] for one in found}) == 13
    assert [one for one in found if one["spill_bytes"]] == []
    assert [one for one in found if one["shared_bytes"] > 163 << 10] == []
