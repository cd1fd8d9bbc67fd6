"""Broken messages from good ones, the same for the same seed: for the fuzz tests of the codec and of every socket."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgpack

from ipc.codec import MAX_COLUMN, pack_ints
from ipc.registry import MESSAGE_TYPES

Frames = list[bytes]

EDGES: tuple[int, ...] = (-1, 0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**31), -(2**63))

BOMBS: tuple[bytes, ...] = (
    b"\xdd\xff\xff\xff\xff",  # an array, a map, a bin and a text of 4 GiB, of which nothing follows
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 2000,  # nested deeper than anyone reads
    b"\xd4\x01\x01",  # an extension type
    b"\xc1",
)

LIFE = ("core_id", "epoch", "rank", "nonce", "step_id", "key")
"""Fields that say whose message it is; another value makes a stranger's, or one of another time, of it."""


class Mutator:
    """Draws one broken, foreign or replayed message after the other. Some of them are still good ones."""

    def __init__(self, seed: int, samples: Sequence[Sequence[bytes]]) -> None:
        """``samples``: frames of valid messages; what is stolen while an engine runs may be added to them."""
        self.samples = [list(map(bytes, sample)) for sample in samples]
        self._draw = random.Random(seed)
        self._kinds: list[Callable[[Frames], Frames]] = [
            self._noise, self._other_bytes, self._cut_or_grown, self._other_frames, self._other_value, self._other_value,
            self._other_life, self._bomb, self._other_tag, self._as_it_is,
        ]  # fmt: skip

    def next(self) -> Frames:
        frames = list(self._draw.choice(self.samples))
        for _ in range(self._draw.choice((1, 1, 1, 2, 3))):
            frames = self._draw.choice(self._kinds)(frames) or [b""]
        return frames

    def value(self, depth: int = 2) -> Any:
        """Anything that msgpack can say, mostly at an edge."""
        draw = self._draw
        kind = draw.randrange(10 if depth else 8)
        match kind:
            case 0:
                return None
            case 1 | 2:
                return draw.choice(EDGES)
            case 3:
                return draw.choice((0.0, -1.5, 1e308, float("nan"), float("inf"), True, False))
            case 4:
                return draw.choice(("", "é", "r", "x" * 129, "x" * 300, "abort", "stats", "\0"))
            case 5:
                return draw.randbytes(draw.randrange(12))
            case 6:
                return draw.choice((pack_ints([1, 2]), pack_ints([9] * 9), b"\0" + bytes(4) + MAX_COLUMN.to_bytes(4, "little"), b"\0" + b"\xff" * 8))
            case 7:
                return draw.getrandbits(64)
            case 8:
                return [self.value(depth - 1) for _ in range(draw.randrange(4))]
            case _:
                names = ("top_p", "stop", "seed", "n", "max_tokens", "structured", 5)
                return {draw.choice(names): self.value(depth - 1) for _ in range(draw.randrange(3))}

    # ------------------------------------------------------------------------------------------ kinds of damage

    def _as_it_is(self, frames: Frames) -> Frames:
        return frames

    def _noise(self, frames: Frames) -> Frames:
        return [self._draw.randbytes(self._draw.randrange(40)) for _ in range(self._draw.randrange(1, 7))]

    def _other_bytes(self, frames: Frames) -> Frames:
        def change(frame: bytes) -> bytes:
            changed = bytearray(frame)
            for _ in range(self._draw.randrange(1, 4)):
                at = self._draw.randrange(len(changed) + 1)
                changed[at : at + self._draw.randrange(3)] = self._draw.randbytes(self._draw.randrange(3))
            return bytes(changed)

        return self._with_one_frame(frames, change)

    def _cut_or_grown(self, frames: Frames) -> Frames:
        def change(frame: bytes) -> bytes:
            if self._draw.random() < 0.6:
                return frame[: self._draw.randrange(len(frame) + 1)]
            return frame + bytes(self._draw.choice((1, 4, 100, 70_000)))

        return self._with_one_frame(frames, change)

    def _other_frames(self, frames: Frames) -> Frames:
        """A wrong number of them, or another order."""
        at = self._draw.randrange(len(frames))
        match self._draw.randrange(5):
            case 0:
                return frames[:at] + frames[at + 1 :]
            case 1:
                return [*frames[:at], frames[at], *frames[at:]]
            case 2:
                return self._draw.sample(frames, len(frames))
            case 3:
                return [*frames, *[b""] * self._draw.choice((1, 2, 300))]
            case _:
                return [b"", *frames]

    def _other_value(self, frames: Frames) -> Frames:
        head = _head_of(frames)
        if not head:
            return frames
        where: Any = head
        index = self._place_in(head)
        while isinstance(where[index], list | dict) and where[index] and self._draw.random() < 0.7:
            where, index = where[index], self._place_in(where[index])
        where[index] = self.value()
        return _with_head(frames, head)

    def _other_life(self, frames: Frames) -> Frames:
        head, names = _head_of(frames), _names_of(frames)
        places = [i for i, name in enumerate(names) if name in LIFE and i < len(head)]
        if not places:
            return self._other_value(frames)
        at = self._draw.choice(places)
        near = head[at] + self._draw.choice((-1, 1, 2)) if isinstance(head[at], int) else 0
        head[at] = self._draw.choice((max(0, near), self._draw.randrange(4), self._draw.getrandbits(64)))
        return _with_head(frames, head)

    def _bomb(self, frames: Frames) -> Frames:
        bomb = self._draw.choice(BOMBS)
        if len(frames) < 3 or self._draw.random() < 0.5:
            return [*frames[:2], bomb, *frames[3:]]
        # Behind a good beginning: an array of 15 fields, the first of which are there.
        return [*frames[:2], b"\x9f" + frames[2][1 : self._draw.randrange(len(frames[2]) + 1)] + bomb, *frames[3:]]

    def _other_tag(self, frames: Frames) -> Frames:
        tag = self._draw.choice([*MESSAGE_TYPES, self._draw.randrange(256)])
        return [frames[0], bytes((tag,)), *frames[2:]]

    def _place_in(self, items: Any) -> Any:
        return self._draw.choice(list(items)) if isinstance(items, dict) else self._draw.randrange(len(items))

    def _with_one_frame(self, frames: Frames, change: Callable[[bytes], bytes]) -> Frames:
        at = self._draw.randrange(len(frames))
        return [*frames[:at], change(frames[at]), *frames[at + 1 :]]


def with_fields(frames: Sequence[bytes], **values: Any) -> Frames:
    """A good message with other values of some of its fields."""
    head, names = _head_of(list(frames)), _names_of(list(frames))
    for name, value in values.items():
        head[names.index(name)] = value
    return [*map(bytes, frames[:2]), msgpack.packb(head), *frames[3:]]


def _head_of(frames: Frames) -> list[Any]:
    try:
        head = msgpack.unpackb(frames[2], raw=False, strict_map_key=False, max_ext_len=0)
    except (IndexError, ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return []
    return head if isinstance(head, list) else []


def _with_head(frames: Frames, head: list[Any]) -> Frames:
    """As they are when a head that was read, deep as it may be, or with a number that grew, can't be written."""
    try:
        return [*frames[:2], msgpack.packb(head), *frames[3:]]
    except (OverflowError, ValueError):
        return frames


def _names_of(frames: Frames) -> list[str]:
    kind = MESSAGE_TYPES.get(frames[1][0]) if len(frames) > 1 and len(frames[1]) == 1 else None
    return [f.name for f in fields(kind)] if kind is not None else []
