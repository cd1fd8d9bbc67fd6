"""What is an encoder, seen from outside? Something that computes the tokens of several items in one pass."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Item = Mapping[str, Tensor]
"""What an encoder is given of one image: each of its inputs by name, [N, *shape] on its device; N, the tokens, is the same
in all. Not to be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedInput:
    """One tensor that a pass reads, with a row for each token; the items' rows lie behind each other."""

    name: str
    shape: tuple[int, ...]
    """Of one row."""
    dtype: torch.dtype
    padding: float
    """What every element of the rows behind the last item holds."""


ITEM_IDS = PackedInput(name="item_ids", shape=(), dtype=torch.int32, padding=-1)
"""Which item of the pass a token belongs to. Padding is one more item: it attends to itself, so that no softmax is over
nothing, and no other item attends to it."""


class PackedEncoder(nn.Module, ABC):
    """Tokens attend to the tokens of their own item only, so that an item's output doesn't depend on its neighbours.

    That holds for finite numbers: what is masked is multiplied by zero, and NaN times zero is NaN. Whoever makes items sees
    to it that they are finite and of a magnitude that stays so.
    """

    output_width: int
    dtype: torch.dtype
    """Of the output."""
    device: torch.device

    @abstractmethod
    def inputs(self) -> tuple[PackedInput, ...]:
        """What an item consists of; ``ITEM_IDS`` is added by whoever packs."""

    @abstractmethod
    def forward(self, inputs: Mapping[str, Tensor], item_ids: Tensor) -> Tensor:
        """[T, output_width]. Sizes follow from shapes alone and nothing is read back from the device: it can be captured.

        ``inputs``: [T, *shape] by name. ``item_ids``: [T], as ``ITEM_IDS`` says.
        """
