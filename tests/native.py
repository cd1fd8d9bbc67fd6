"""Runs a test with one instruction set of the native code, or without native code."""

import functools

import pytest

from kernels.cpu import native
from kernels.cpu.native import FOLDER, NativeLibrary


@functools.cache
def library(instruction_set: str) -> NativeLibrary:
    return NativeLibrary(next(FOLDER.glob("native_library*.so")), instruction_set)


def _instruction_sets() -> tuple[str, ...]:
    found = native.native_library()
    return found.instruction_sets if found is not None else ()


INSTRUCTION_SETS = _instruction_sets()
"""Those that this processor runs; none where there was no compiler."""


def use_instruction_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch``: as if the library was missing."""
    used = None if name == "torch" else library(name)
    monkeypatch.setattr(native, "native_library", lambda: used)
