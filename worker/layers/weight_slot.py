"""Where does one tensor of a checkpoint go?"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """A place in a stage that one checkpoint tensor fills."""

    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
    """Takes the tensor in any float dtype and copies it."""

    aliases: tuple[str, ...] = ()
    """Other names under which a checkpoint may hold the same tensor."""
