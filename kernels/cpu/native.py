"""Is there native code for this processor, and how is it called?

Functions take addresses and sizes. Who calls one has checked shapes, and that `native_for` serves the tensors.
"""

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).resolve().parent
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types that native code knows, and the numbers that stand for them."""

_POINTER, _INT, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_OPENMP_RUNTIMES = ("libgomp", "libiomp5", "libomp")


class NativeError(Exception):
    """The library is not there, or not fit to be used."""


class NativeLibrary:
    """The functions of one instruction set. `dtype` is a number of DTYPES; results never depend on the threads."""

    def __init__(self, path: Path, instruction_set: str | None = None) -> None:
        """By default the best set that this processor runs.

        Raises:
            NativeError: no such library, one of other sources, or a set that it hasn't or the processor can't run.
        """
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeError(f"{path.name} can't be loaded: {error}") from error
        _refuse_stale(self._library)
        self._library.instruction_sets.restype = ctypes.c_char_p
        runnable = self._library.instruction_sets().decode().split()
        self.instruction_sets = tuple(name for name in runnable if hasattr(self._library, f"{name}_rms_norm"))
        self.instruction_set = instruction_set or self.instruction_sets[0]
        if self.instruction_set not in self.instruction_sets:
            raise NativeError(f"{self.instruction_set} is none of {', '.join(self.instruction_sets)}")
        self.has_threads = _lend_threads(self._library)

        self.rms_norm = self._function("rms_norm", *[_POINTER] * 5, _INT64, _INT64, _FLOAT, _INT, _INT)
        self.rope = self._function("rope", *[_POINTER] * 3, *[_INT64] * 4, _INT, _INT)
        self.attention = self._function("attention", *[_POINTER] * 7, *[_INT64] * 11, _FLOAT, _FLOAT, _INT, _INT)
        self.append_kv = self._function("append_kv", *[_POINTER] * 4, *[_INT64] * 7, _INT, _INT)
        self.argmax = self._function("argmax", _POINTER, _POINTER, _INT64, _INT64, _INT)
        self.cut = self._function("cut", *[_POINTER] * 7, _INT64, _INT64, _INT)
        self.draw = self._function("draw", *[_POINTER] * 7, _INT64, _INT64, _INT)
        self.penalties = self._function("penalties", *[_POINTER] * 7, _INT64, _INT64, _INT)
        self.token_mask = self._function("token_mask", *[_POINTER] * 3, _INT64, _INT64, _INT)
        self.silu_mul = self._function("silu_mul", _POINTER, _POINTER, _INT64, _INT64, _INT, _INT)
        self.pack_linear = self._function("pack_linear", _POINTER, _POINTER, _INT64, _INT64, _INT)
        self.linear = self._function("linear", *[_POINTER] * 4, *[_INT64] * 4, _INT, _INT)

    def _function(self, name: str, *argument_types: type) -> Callable[..., int]:
        """What it returns means something only where its source says so."""
        function = self._library[f"{self.instruction_set}_{name}"]
        function.argtypes, function.restype = argument_types, _INT
        return function


def _refuse_stale(library: ctypes.CDLL) -> None:
    """An editable install whose sources changed: signatures may no longer be what this file believes."""
    library.source_digest.restype = ctypes.c_char_p
    sources = FOLDER / "src"
    if sources.is_dir():
        digest = hashlib.sha256()
        for path in sorted(sources.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        if library.source_digest().decode() != digest.hexdigest()[:16]:
            raise NativeError("it was built of other sources; run: python setup.py build_ext --inplace")


def _lend_threads(library: ctypes.CDLL) -> bool:
    """Give it the threads of the OpenMP runtime that torch loaded: a second runtime's would fight with those for the cores.

    GOMP_parallel is also what the runtimes of LLVM and Intel answer to. Without one, native code runs on one thread.
    """
    for runtime in (None, *_loaded_openmp()):
        function = getattr(ctypes.CDLL(runtime), "GOMP_parallel", None)
        if function is not None:
            library.set_parallel(ctypes.cast(function, _POINTER))
            return True
    return False


def _loaded_openmp() -> list[str]:
    maps = Path("/proc/self/maps")
    paths = (
        {line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if "/" in line}
        if maps.exists()
        else set()
    )
    return sorted(path for path in paths if Path(path).name.startswith(_OPENMP_RUNTIMES))


@functools.cache
def native_library() -> NativeLibrary | None:
    """The library that is used, or None: then plain torch computes. Says which, once."""
    (path, *_) = [*sorted(FOLDER.glob("native_library*.so")), FOLDER / "native_library.so"]
    try:
        library = NativeLibrary(path)
    except NativeError as error:
        logger.warning("no native CPU kernels, plain torch computes (slower): %s", error)
        return None
    threads = "" if library.has_threads else ", one thread: no OpenMP runtime is loaded"
    logger.info("native CPU kernels: %s%s", library.instruction_set, threads)
    return library


def native_for(*tensors: Tensor) -> NativeLibrary | None:
    """The library, when all of these are on the CPU and of one type that it knows. Their strides are the caller's matter."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES:
        return None
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype != dtype:
            return None
    return native_library()
