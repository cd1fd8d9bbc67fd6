"""How does a matrix get from a checkpoint into the form it is computed in?

A Linear owns its weight's format, and a format has a life of three acts: ``load`` takes rows of the dense matrix as the
checkpoint has them, ``prepare`` is told that all are there, ``apply`` multiplies. Models see Linears only.
"""

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from worker.layers.weight_slot import WeightSlot


class WeightFormat(ABC):
    """One matrix [out, in] in whatever form is good to compute with."""

    @abstractmethod
    def load(self, first_row: int, weight: Tensor) -> None:
        """Rows of the dense matrix, any float dtype; copied."""

    @abstractmethod
    def prepare(self) -> None:
        """All rows are loaded; called once, before the first ``apply``."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out] of x's dtype."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Memory it holds."""


class PlainFormat(WeightFormat):
    """The dense matrix as it is."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    @classmethod
    def empty(cls, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> "PlainFormat":
        return cls(torch.empty(out_features, in_features, dtype=dtype, device=device))

    def load(self, first_row: int, weight: Tensor) -> None:
        self.weight[first_row : first_row + weight.shape[0]].copy_(weight)

    def prepare(self) -> None:
        """Dense is what it computes in."""

    def apply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.weight, bias)

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes


class Linear(nn.Module):
    """One matrix made of parts: checkpoint tensors with the same input, stacked, so that one product serves all."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: WeightFormat | None = None,
    ) -> None:
        """``parts``: checkpoint names without ``.weight``, and the rows of each, in order of output.

        ``weight``: a format that is filled by someone else (a tied head); then this one has no slots.
        """
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.is_shared = weight is not None
        out_features = sum(parts.values())
        self.format = weight or PlainFormat.empty(out_features, in_features, dtype, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.format.apply(x, self.bias)

    def prepare(self) -> None:
        if not self.is_shared:
            self.format.prepare()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """What the checkpoint has to fill."""
        if self.is_shared:
            return {}
        slots = {}
        first_row = 0
        for name, num_rows in self.parts.items():
            slots[f"{name}.weight"] = WeightSlot(
                shape=(num_rows, self.in_features), load=partial(self.format.load, first_row)
            )
            if self.bias is not None:
                bias = self.bias[first_row : first_row + num_rows]
                slots[f"{name}.bias"] = WeightSlot(shape=(num_rows,), load=bias.copy_)
            first_row += num_rows
        return slots

    @property
    def size_bytes(self) -> int:
        weight_bytes = 0 if self.is_shared else self.format.size_bytes
        return weight_bytes + (0 if self.bias is None else self.bias.nbytes)
