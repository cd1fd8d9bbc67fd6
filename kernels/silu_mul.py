"""The gate of a Llama MLP: silu(gate) * up."""

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu of the left half of each row times its right half; computed in float32, rounded once.

    Shapes:
        gate_up: [T, 2 * I]; not changed
        returns  [T, I]

    Bytes: gate_up read, half of it written.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"rows of {gate_up.shape[-1]} elements have no two halves")
    return silu_mul_definition(gate_up)


def silu_mul_definition(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate.float()) * up.float()).to(gate_up.dtype)
