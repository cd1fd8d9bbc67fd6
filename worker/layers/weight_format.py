"""In which form does a matrix lie in memory, and how is it multiplied with?"""

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.cpu.huge_pages import weight_memory
from kernels.cpu.native import native_for
from kernels.packed_linear import pack_linear, packed_linear, packed_size

PACKED_DTYPES = (torch.bfloat16,)
"""Not float32: packed it is up to twice as fast, but its sums are 1.6 times as far from the exact ones as the plain ones
(576 inputs, 4.6e-7 against 2.9e-7), and who asks for float32 wants the numbers."""

PACKED_BLOCK = 64
"""The library pads both sides to its blocks, whose sides divide this."""

MAX_PADDING = 1.1
"""Packed to dense size up to which a matrix is packed. Every model of a useful size is well below."""


class WeightFormat(ABC):
    """One matrix [out, in] in whatever form is good to compute with."""

    @abstractmethod
    def load(self, first_row: int, weight: Tensor) -> None:
        """Rows of the dense matrix, any float dtype; copied. Not after ``prepare``."""

    @abstractmethod
    def prepare(self) -> None:
        """All rows are loaded; called once, before the first ``apply``."""

    @abstractmethod
    def apply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in] -> [T, out] of x's dtype, or of ``dtype``: float32 costs nothing where sums are kept in it anyhow."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Memory it holds, without what it borrows."""


class PlainFormat(WeightFormat):
    """The dense matrix as it is."""

    def __init__(self, weight: Tensor, *, is_borrowed: bool = False) -> None:
        """``is_borrowed``: the matrix is held and filled by someone else."""
        self.weight = weight
        self._is_borrowed = is_borrowed

    def load(self, first_row: int, weight: Tensor) -> None:
        self.weight[first_row : first_row + weight.shape[0]].copy_(weight)

    def prepare(self) -> None:
        """Dense is what it computes in."""

    def apply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return linear(x, self.weight, bias).to(dtype or x.dtype)

    @property
    def size_bytes(self) -> int:
        return 0 if self._is_borrowed else self.weight.nbytes


class _RearrangedFormat(WeightFormat):
    """Made of the dense matrix when that is complete, which is let go then: nobody holds it who doesn't need it."""

    def __init__(self, weight: Tensor) -> None:
        """``weight``: the dense matrix, kept until ``prepare``; filled by ``load``, or by someone else who holds it too."""
        self.num_outputs = weight.shape[0]
        self._dense: Tensor | None = weight
        self._packed: Tensor | None = None

    def load(self, first_row: int, weight: Tensor) -> None:
        assert self._dense is not None, "rows come before the matrix is packed"
        self._dense[first_row : first_row + weight.shape[0]].copy_(weight)

    def prepare(self) -> None:
        assert self._dense is not None, "prepared once"
        self._packed = self._pack(self._dense)
        self._dense = None

    @abstractmethod
    def _pack(self, dense: Tensor) -> Tensor: ...

    @property
    def packed(self) -> Tensor:
        assert self._packed is not None, "prepared before it is used"
        return self._packed


class PanelFormat(_RearrangedFormat):
    """In panels that our own kernel reads from begin to end, in large pages, for any number of rows.

    A row's result is the same bits in any step.
    """

    def _pack(self, dense: Tensor) -> Tensor:
        packed = weight_memory().empty(packed_size(*dense.shape), dense.dtype)
        pack_linear(packed, dense)
        return packed

    def apply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return packed_linear(x, self.packed, self.num_outputs, bias, dtype or x.dtype)

    @property
    def size_bytes(self) -> int:
        return self.packed.nbytes if self._dense is None else self._dense.nbytes


class PackedFormat(_RearrangedFormat):
    """In the blocks in which the CPU library (oneDNN) multiplies; it would else rearrange the matrix at every product.

    The layout is the same for any number of rows.
    """

    def _pack(self, dense: Tensor) -> Tensor:
        return _pack(dense)

    def apply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        return _multiply(x, self.packed, bias).to(dtype or x.dtype)

    @property
    def size_bytes(self) -> int:
        return int(torch.ops.mkldnn._nbytes(self.packed)) if self._dense is None else self._dense.nbytes


def empty_format(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> WeightFormat:
    """The best format for a matrix of this kind, to be filled by ``load``."""
    weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
    return _rearranged(weight) or PlainFormat(weight)


def borrowed_format(weight: Tensor) -> WeightFormat:
    """The best format for a matrix that someone else fills before ``prepare``, and goes on using.

    Where packing pays it takes a packed copy: a head is the largest matrix of its stage, and the largest of small models.
    """
    return _rearranged(weight) or PlainFormat(weight, is_borrowed=True)


def _rearranged(weight: Tensor) -> WeightFormat | None:
    """In the form that is worth a copy, if there is one."""
    if weight.device.type != "cpu" or weight.dtype not in PACKED_DTYPES:
        return None
    if _fits_panels(weight) and computes_in_panels(weight.dtype):
        return PanelFormat(weight)
    return PackedFormat(weight) if _fits_blocks(weight) and can_pack(weight.dtype) else None


def _fits_panels(weight: Tensor) -> bool:
    return packed_size(*weight.shape) <= MAX_PADDING * weight.numel()


def _fits_blocks(weight: Tensor) -> bool:
    padded = 1
    for size in weight.shape:
        padded *= -(-size // PACKED_BLOCK) * PACKED_BLOCK
    return padded <= MAX_PADDING * weight.numel()


def computes_in_panels(dtype: torch.dtype) -> bool:
    """Whether our kernel is the fastest on this CPU: everywhere with AVX2 or more.

    But not where there is a matrix unit (AMX) that only the library uses: our code was compiled without it.
    """
    native = native_for(torch.empty(0, dtype=dtype))
    if native is None or native.instruction_set == "baseline":
        return False
    return native.instruction_set == "amx" or not _has_matrix_unit()


def _has_matrix_unit() -> bool:
    return hasattr(torch.cpu, "_is_amx_tile_supported") and bool(torch.cpu._is_amx_tile_supported())


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch on this CPU packs and multiplies as we expect; its operators for that promise nothing."""
    weight = torch.arange(-32, 32, dtype=dtype).repeat(PACKED_BLOCK, 1) / 16
    x = torch.arange(3 * PACKED_BLOCK, dtype=dtype).view(3, -1) / 64
    try:
        product = _multiply(x, _pack(weight), weight[:, 0].contiguous())
        size_bytes = torch.ops.mkldnn._nbytes(_pack(weight))
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    expected = linear(x.double(), weight.double(), weight[:, 0].double())
    return (
        size_bytes >= weight.nbytes
        and product.dtype == dtype
        and torch.allclose(product.double(), expected, rtol=0.02, atol=0.02)
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
