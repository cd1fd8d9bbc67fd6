"""Lets tests run Triton kernels: on CPU tensors in triton's interpreter, of which bfloat16 is repaired first.

With TRITON_INTERPRET=0 and a GPU the same tests run compiled kernels there.

The interpreter keeps bfloat16 as bits. It multiplies matrices of such bits as if they were integers, and loses the carry
when it rounds to them.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

from kernels.gpu import dispatch

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
"""Where tests of Triton kernels have their tensors; tests/conftest.py turns the interpreter on unless it is told."""


def use_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test: CPU tensors go to Triton kernels. On a GPU they go there anyway, and CPU tensors don't."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="triton is not installed here")
    tl = pytest.importorskip("triton.language")
    triton = pytest.importorskip("triton")
    if DEVICE.type == "cuda":
        return
    assert triton.knobs.runtime.interpret, "triton was loaded before tests/conftest.py turned its interpreter on"
    if _version(triton) < (3, 7) and _version(np) >= (2, 4):
        pytest.skip("triton's interpreter before 3.7 takes numbers out of arrays in a way that numpy 2.4 refuses")
    plain_convert, plain_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            return _as_bfloat16(data).reshape(data.shape)
        return plain_convert(data, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        a, b = (
            interpreter.TensorHandle(_as_float32(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return plain_dot(self, a, b, *others)

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(dispatch, "serves", lambda device: device.type == "cpu")


def _version(module: Any) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))


def _as_bfloat16(data: Any) -> Any:
    rounded = torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


def _as_float32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)
