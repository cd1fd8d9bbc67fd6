"""The gate of a Gemma MLP: gelu(gate) * up."""

from torch import Tensor
from torch.nn.functional import gelu

from kernels.gpu.dispatch import triton_for


def gelu_mul(gate_up: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu of the left half of each row times its right half; computed in float32, rounded once.

    ``approximate``: ``none`` for the exact one, ``tanh`` for the usual formula with it.

    Shapes:
        gate_up: [T, 2 * I]; not changed
        returns  [T, I]

    Bytes: gate_up read, half of it written.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"rows of {gate_up.shape[-1]} elements have no two halves")
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate={approximate!r} is neither 'none' nor 'tanh'")
    gpu = triton_for(gate_up)
    if gpu is not None:
        return gpu.gate_mul(gate_up, "gelu" if approximate == "none" else "gelu_tanh")
    return gelu_mul_definition(gate_up, approximate=approximate)


def gelu_mul_definition(gate_up: Tensor, *, approximate: str = "none") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (gelu(gate.float(), approximate=approximate) * up.float()).to(gate_up.dtype)
