"""Is the native library the one of its sources, on torch's threads, and is a missing or strange one refused?"""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import native
from kernels.cpu.native import FOLDER, NativeError, NativeLibrary
from tests.native import INSTRUCTION_SETS

ROOT = Path(__file__).resolve().parents[2]
needs_library = pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")


def library_path() -> Path:
    return next(FOLDER.glob("native_library*.so"))


@needs_library
def test_the_best_instruction_set_is_chosen() -> None:
    assert NativeLibrary(library_path()).instruction_set == INSTRUCTION_SETS[0]
    assert INSTRUCTION_SETS[-1] == "baseline"
    with pytest.raises(NativeError, match="mmx is none of"):
        NativeLibrary(library_path(), "mmx")


@needs_library
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER / "src", tmp_path / "src")
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    NativeLibrary(library_path())
    with (tmp_path / "src" / "rows.cpp").open("a") as source:
        source.write("\n")
    with pytest.raises(NativeError, match="built of other sources"):
        NativeLibrary(library_path())


def test_a_missing_library_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    native.native_library.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert [native.native_library(), native.native_library()] == [None, None]
    finally:
        native.native_library.cache_clear()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no native CPU kernels, plain torch computes (slower)"
    ]


@needs_library
def test_there_is_one_openmp_runtime_and_its_threads_are_shared() -> None:
    """Whether torch's threads are there before ours are asked for or after: no new ones come, nor a second runtime."""
    script = """
import os, torch
from kernels.cpu.native import native_library
from kernels.silu_mul import silu_mul
torch.set_num_threads(3)
assert native_library().has_threads
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
silu_mul(torch.randn(4000, 512))
ours = count()
torch.randn(4000, 512).add_(1).exp_()
maps = {line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.rsplit("/", 1)[-1]}
print(ours - before, count() - before, len(maps))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["2", "2", "1"]


@pytest.mark.skipif("amx" not in INSTRUCTION_SETS, reason="no matrix unit")
def test_without_leave_for_tiles_vectors_compute() -> None:
    """The system refuses tiles where a stack for signals has no room for their content."""
    script = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0

import torch
from kernels.cpu.native import native_library
from kernels.packed_linear import pack_linear, packed_linear, packed_size
print(native_library().instruction_set)
packed = torch.empty(packed_size(64, 64), dtype=torch.bfloat16)
pack_linear(packed, torch.ones(64, 64, dtype=torch.bfloat16))
print(packed_linear(torch.ones(1, 64, dtype=torch.bfloat16), packed, 64)[0, 0].item())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [INSTRUCTION_SETS[1], "64.0"]
