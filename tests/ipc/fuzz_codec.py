"""Coverage-guided fuzzing of the codec with atheris: only its own errors come out, and no message costs more than it weighs.

    python -m tests.ipc.fuzz_codec -max_total_time=600       libFuzzer's options; a folder of inputs may follow

One input is the frames of a message, each behind its length in three bytes. Inputs begin as the samples of wire_samples, and are changed
by libFuzzer's own means within one frame, or as ``mutations`` does.
"""

import random
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install -c constraints.txt -e '.[fuzz]'")

with atheris.instrument_imports(include=["ipc", "msgpack"]):
    from ipc import codec
    from ipc.errors import ProtocolError, RequestError

from ipc.registry import MESSAGE_TYPES
from tests.ipc.mutations import Frames, Mutator
from tests.wire_samples import SAMPLES, plain

EVERY = tuple(MESSAGE_TYPES.values())

WORST_BYTES = 8 * codec.MAX_COLUMN_VALUES
"""What columns may add to what was sent: their limit, as pointers to small integers."""

BYTES_PER_BYTE = 256
"""What a byte of a head may become, see decode."""

MAX_GROWTH_BYTES = 512 << 20
"""Of the process, over all inputs: the columns of a message before it is refused, twice, and atheris' own tables."""


def split(data: bytes) -> Frames:
    frames, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 3], "little")
        frames.append(data[at + 3 : at + 3 + size])
        at += 3 + size
    return frames


def join(frames: Sequence[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(3, "little") + frame for frame in frames)


def weight(value: Any) -> int:
    """Bytes of the objects in what ``plain`` gives; equal objects count as often as they are met, lists of integers by their pointers."""
    own = sys.getsizeof(value)
    if isinstance(value, dict):
        return own + sum(weight(key) + weight(item) for key, item in value.items())
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return own + sum(map(weight, value))
    return own


def check(data: bytes) -> None:
    """One input. Raises whatever the codec must not raise, and AssertionError."""
    frames = split(data)
    codec.request_id_of(frames)
    try:
        message = codec.decode(frames, EVERY)
    except (ProtocolError, RequestError) as error:
        assert len(str(error)) < 600, "an error that repeats what it was sent"
        return
    values = plain(message)
    assert weight(values) <= BYTES_PER_BYTE * len(data) + WORST_BYTES + 10_000, "a message that weighs more than its limits"
    again = plain(codec.decode(codec.encode(message), EVERY))
    assert again == values or repr(again) == repr(values), "a message that does not come back"  # a NaN equals nothing


class Watch:
    """``check`` with an eye on the process's memory."""

    def __init__(self) -> None:
        self._at_first: int | None = None

    def __call__(self, data: bytes) -> None:
        check(data)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self._at_first = self._at_first or peak
        assert peak - self._at_first <= MAX_GROWTH_BYTES, f"memory grew by {peak - self._at_first} bytes"


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Within one frame by libFuzzer's means, or by ours."""
    draw, frames = random.Random(seed), split(data)
    if not frames or draw.random() < 0.05:
        return bytes(atheris.Mutate(data, max_size))
    if draw.random() < 0.3:
        return join(Mutator(seed, [frames]).next())[:max_size]
    at = draw.randrange(len(frames))
    frames[at] = bytes(atheris.Mutate(frames[at], max(1, max_size - len(data) + len(frames[at]))))
    return join(frames)[:max_size]


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for sample in SAMPLES:
            (Path(corpus) / type(sample).__name__).write_bytes(join([bytes(frame) for frame in codec.encode(sample)]))
        atheris.Setup([*sys.argv, corpus], Watch(), custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
