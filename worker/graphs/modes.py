"""How much of which steps is captured? The modes, what a backend has to be able to do for them, and the sizes."""

from collections.abc import Sequence
from enum import Enum, IntEnum

from ipc.errors import ConfigError

MODE_FLAG, SIZES_FLAG = "--cudagraph-mode", "--cudagraph-capture-sizes"

LARGEST_BY_RULE = 512
"""Tokens; in larger steps the device computes for longer than the host takes to launch it."""

FINE_UP_TO = 256
"""Sizes are multiples of 8 up to here, of 16 behind it."""


class GraphSupport(IntEnum):
    """Of which steps an attention backend's work can be recorded once and replayed for other steps of the same shape."""

    NEVER = 0
    UNIFORM_DECODE = 1
    """Of steps in which every sequence has one query."""
    ALWAYS = 2


class CudagraphMode(Enum):
    """What is captured of a step, or by the names that join two: of decodes, and of steps with a prompt among them."""

    NONE = "none"
    PIECEWISE = "piecewise"
    """The segments between attention calls; attention runs eagerly."""
    FULL = "full"
    """Everything, attention included."""
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"

    @property
    def of_decodes(self) -> "CudagraphMode":
        """NONE, PIECEWISE or FULL: what this mode makes of a step in which every sequence has one query."""
        return _OF_STEPS[self][0]

    @property
    def of_mixed(self) -> "CudagraphMode":
        """NONE, PIECEWISE or FULL: what this mode makes of any other step."""
        return _OF_STEPS[self][1]


_OF_STEPS = {
    CudagraphMode.NONE: (CudagraphMode.NONE, CudagraphMode.NONE),
    CudagraphMode.PIECEWISE: (CudagraphMode.PIECEWISE, CudagraphMode.PIECEWISE),
    CudagraphMode.FULL: (CudagraphMode.FULL, CudagraphMode.FULL),
    CudagraphMode.FULL_DECODE_ONLY: (CudagraphMode.FULL, CudagraphMode.NONE),
    CudagraphMode.FULL_AND_PIECEWISE: (CudagraphMode.FULL, CudagraphMode.PIECEWISE),
}

MODE_NAMES = ("auto", *(mode.value for mode in CudagraphMode))


def default_mode(device_type: str) -> CudagraphMode:
    """What ``auto`` means: on a CPU nothing is launched, so padding would only add rows to compute."""
    return CudagraphMode.FULL_AND_PIECEWISE if device_type == "cuda" else CudagraphMode.NONE


def lowered(mode: CudagraphMode, support: GraphSupport) -> CudagraphMode:
    """The most of this mode that a backend with this support can serve."""
    if support is GraphSupport.NEVER and CudagraphMode.FULL in (mode.of_decodes, mode.of_mixed):
        return CudagraphMode.PIECEWISE
    if support is GraphSupport.UNIFORM_DECODE and mode is CudagraphMode.FULL:
        return CudagraphMode.FULL_AND_PIECEWISE
    return mode


def sizes_by_rule(*, max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8, then of 16, up to what the flags allow and what is worth it."""
    largest = min(LARGEST_BY_RULE, 2 * max_num_seqs, max_num_batched_tokens)
    sizes = (1, 2, 4, *range(8, FINE_UP_TO, 8), *range(FINE_UP_TO, LARGEST_BY_RULE + 1, 16))
    return tuple(size for size in sizes if size <= largest)


def put_right(asked: Sequence[int], *, max_num_batched_tokens: int) -> tuple[tuple[int, ...], list[str]]:
    """Sizes as a list of them should be, ascending and each within the limit, and what was done to that end.

    Raises:
        ConfigError: there is none, one is below 1, or all are above the limit.
    """
    if not asked:
        raise ConfigError(SIZES_FLAG, "is empty; give sizes such as 1,2,4,8, or leave the flag out")
    if min(asked) < 1:
        raise ConfigError(SIZES_FLAG, f"{min(asked)} must be at least 1")
    sizes = tuple(sorted({size for size in asked if size <= max_num_batched_tokens}))
    if not sizes:
        raise ConfigError(SIZES_FLAG, f"{min(asked)} is above --max-num-batched-tokens {max_num_batched_tokens}")
    notes = []
    if list(asked) != sorted(set(asked)):
        notes.append("sorted, each size once")
    too_large = sorted(set(asked) - set(sizes))
    if too_large:
        left_out = ", ".join(map(str, too_large))
        notes.append(f"{left_out} left out, above --max-num-batched-tokens {max_num_batched_tokens}")
    return sizes, notes
