"""How does a thread that mostly waits get a core at once when every core computes?

Linux gives a thread that wakes up a busy core only when the one that runs there has used up its slice, or when the newcomer
asks for a shorter slice than that one (EEVDF scheduler). A message that passes through three such threads would come
milliseconds late. Slices are per thread, need no privilege, and change nobody's share of time.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager

SLICE_NS = 100_000
"""The shortest that the kernel grants."""

_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of sched_setattr and sched_getattr; Python and most C libraries have no wrapper."""

_ATTR = struct.Struct("<IIQiIQQQ")
"""struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period (sched_setattr(2))."""

_RUNTIME = 5
"""Place of the slice among them, for threads that are scheduled as usual."""


def ask_for_promptness() -> None:
    """Shorten the slice of the calling thread, and of threads that it starts from now on.

    Does nothing where it can't be done: another scheduling policy, a kernel before 6.12, or not Linux.
    """
    attributes = _attributes(0)
    if attributes is not None:
        _set_slice(attributes, SLICE_NS)


@contextmanager
def prompt_threads() -> Iterator[None]:
    """Threads started inside get cores at once; the caller itself is afterwards as before."""
    before = _attributes(0)
    ask_for_promptness()
    try:
        yield
    finally:
        if before is not None:
            _set_slice(before, before[_RUNTIME])


def slice_ns(thread_id: int = 0) -> int | None:
    """Of a thread of this process, of the calling one by default; None where it isn't known."""
    attributes = _attributes(thread_id)
    return None if attributes is None else attributes[_RUNTIME]


def _attributes(thread_id: int) -> tuple[int, ...] | None:
    """In the order of ``_ATTR``; None unless the thread is scheduled as usual."""
    numbers = _SYSTEM_CALLS.get(platform.machine())
    if numbers is None:
        return None
    buffer = ctypes.create_string_buffer(_ATTR.size)
    if ctypes.CDLL(None).syscall(numbers[1], thread_id, buffer, _ATTR.size, 0) != 0:
        return None
    attributes = _ATTR.unpack(buffer.raw)
    return attributes if attributes[1] == os.SCHED_OTHER else None


def _set_slice(attributes: tuple[int, ...], nanoseconds: int) -> None:
    size, policy, flags, nice, *_ = attributes
    buffer = _ATTR.pack(size, policy, flags, nice, 0, nanoseconds, 0, 0)
    ctypes.CDLL(None).syscall(_SYSTEM_CALLS[platform.machine()][0], 0, buffer, 0)
