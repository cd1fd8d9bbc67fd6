"""What is a layer of a decoder, seen from outside? Something that is cut in two by its attention."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from worker.layers.attention import Attention, Heads


class DecoderLayer(nn.Module, ABC):
    """A layer gets the residual sum and what is still to be added to it, and leaves both: the next norm adds and
    normalises in one pass."""

    attention: Attention

    @abstractmethod
    def before_attention(
        self, hidden: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Heads]:
        """The residual sum, complete, and what is attended with. ``hidden`` is not changed."""

    @abstractmethod
    def after_attention(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual sum [T, C] and what attention gave [T, H, D]."""
