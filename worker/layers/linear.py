"""How does a matrix get from a checkpoint into the form it is computed in?

A Linear owns its weight's format, and a format has a life of three acts: ``load`` takes rows of the dense matrix as the
checkpoint has them, ``prepare`` is told that all are there, ``apply`` multiplies. Models see Linears only.
"""

from functools import partial

import torch
from torch import Tensor, nn

from worker.layers.weight_format import WeightFormat, empty_format
from worker.layers.weight_slot import WeightSlot


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

        ``weight``: a format that is filled by someone else (a tied head); then this one has no slots, and is prepared by
        ``prepare``. Any other is prepared when the last of its parts is loaded, so that what it needs for that (the dense
        matrix beside a packed one) is needed for one matrix at a time.
        """
        super().__init__()
        self.in_features = in_features
        self.parts = parts
        self.is_shared = weight is not None
        out_features = sum(parts.values())
        self.format = weight or empty_format(out_features, in_features, dtype, device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._parts_to_load = set() if self.is_shared else set(parts)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """[T, in] -> [T, out] of x's dtype, or of ``dtype``."""
        return self.format.apply(x, self.bias, dtype)

    def prepare(self) -> None:
        """All is loaded, also what is shared; called once."""
        assert not self._parts_to_load, f"{self._parts_to_load} were not loaded"
        if self.is_shared:
            self.format.prepare()

    def weight_slots(self) -> dict[str, WeightSlot]:
        """What the checkpoint has to fill."""
        if self.is_shared:
            return {}
        slots = {}
        first_row = 0
        for name, num_rows in self.parts.items():
            slots[f"{name}.weight"] = WeightSlot(
                shape=(num_rows, self.in_features), load=partial(self._load_part, name, first_row)
            )
            if self.bias is not None:
                bias = self.bias[first_row : first_row + num_rows]
                slots[f"{name}.bias"] = WeightSlot(shape=(num_rows,), load=bias.copy_)
            first_row += num_rows
        return slots

    @property
    def size_bytes(self) -> int:
        return self.format.size_bytes + (0 if self.bias is None else self.bias.nbytes)

    def _load_part(self, name: str, first_row: int, weight: Tensor) -> None:
        self.format.load(first_row, weight)
        self._parts_to_load.remove(name)
        if not self._parts_to_load:
            self.format.prepare()
