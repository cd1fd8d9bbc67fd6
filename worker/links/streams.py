"""In which order does a device do what a link asks of it?

A device has a compute stream, on which the model runs, and each end of a link has a stream beside it for copies and
transfers. Nothing on a stream has happened when the call that asked for it returns; events say when it has. A link
that leaves out one event works almost always, so the tests run the same code on streams that are as late, or as
early, as the rules allow (tests/worker/fake_streams.py).
"""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from worker.links.link import host_bytes

SPIN_S = 200e-6
"""Most activations are there already when they are waited for; behind this, the processor is given away between looks."""

LOOK_EVERY_S = 50e-6


class Event(Protocol):
    """A point in a stream's work."""

    def wait(self, timeout_s: float | None) -> bool:
        """Have the host wait until the device came past it; False when it did not in time. None: however long."""


class Streams(Protocol):
    """A device's memory, its compute stream and one stream beside it, for one end of a link."""

    def device_bytes(self, size_bytes: int) -> Tensor:
        """Zeroed memory of the device."""

    def host_bytes(self, size_bytes: int) -> Tensor:
        """Zeroed memory of the host that the device can copy from and to while the host goes on."""

    def queue(self, action: Callable[[], object]) -> None:
        """Do it on the compute stream."""

    def mark(self) -> Event:
        """The compute stream as it is now: past all that was queued so far."""

    def beside(self, action: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        """Do it on the stream beside, behind the events and all that was given to it before; returns when it is done."""

    def hold(self, event: Event) -> None:
        """What is queued from now on comes behind the event."""


class _Done:
    def wait(self, timeout_s: float | None) -> bool:
        return True


class HostStreams:
    """The CPU as a device: everything is done at once, in order."""

    def device_bytes(self, size_bytes: int) -> Tensor:
        return host_bytes(size_bytes)

    def host_bytes(self, size_bytes: int) -> Tensor:
        return host_bytes(size_bytes)

    def queue(self, action: Callable[[], object]) -> None:
        action()

    def mark(self) -> Event:
        return _Done()

    def beside(self, action: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        action()
        return _Done()

    def hold(self, event: Event) -> None:
        return


class _CudaEvent:
    def __init__(self, stream: Any) -> None:
        self.raw = torch.cuda.Event(blocking=True)
        self.raw.record(stream)

    def wait(self, timeout_s: float | None) -> bool:
        if timeout_s is None:
            self.raw.synchronize()
            return True
        # CUDA's own wait has no deadline.
        started = time.monotonic()
        while not self.raw.query():
            waited = time.monotonic() - started
            if waited > timeout_s:
                return False
            if waited > SPIN_S:
                time.sleep(LOOK_EVERY_S)
        return True


class CudaStreams:
    """See Streams. The compute stream is the one that is current where this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        self._beside = torch.cuda.Stream(device)

    def device_bytes(self, size_bytes: int) -> Tensor:
        memory = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        # The zeroes are written on the compute stream; the stream beside must not be overtaken by them.
        self._beside.wait_stream(self._compute)
        return memory

    def host_bytes(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def queue(self, action: Callable[[], object]) -> None:
        with torch.cuda.stream(self._compute):
            action()

    def mark(self) -> Event:
        return _CudaEvent(self._compute)

    def beside(self, action: Callable[[], object], after: Iterable[Event] = ()) -> Event:
        with torch.cuda.stream(self._beside):
            for event in after:
                self._beside.wait_event(cast(_CudaEvent, event).raw)
            action()
            return _CudaEvent(self._beside)

    def hold(self, event: Event) -> None:
        self._compute.wait_event(cast(_CudaEvent, event).raw)
