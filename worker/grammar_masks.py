"""How do the masks that the core sends act on a step's logits?

What they forbid stays forbidden, whatever a request's own rules do to the logits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ProtocolError
from ipc.messages import GrammarOutput
from kernels.token_mask import apply_token_mask
from worker.transfer import to_device


def apply_masks(logits: Tensor, rows: NDArray[np.int64], grammar: GrammarOutput | None) -> Tensor | None:
    """Make the logits of forbidden tokens -inf in rows with a mask.

    Shapes:
        logits: [S', V] float32 of ``rows``; changed in place
        returns [N] int64: the places of rows with a mask; None without any

    Raises ProtocolError when masks are for rows that don't sample, or not of this vocabulary.
    """
    if grammar is None or not grammar.rows:
        return None
    num_words = -(-logits.shape[1] // 32)
    if grammar.masks.size != len(grammar.rows) * num_words:
        raise ProtocolError(
            "GrammarOutput.masks", f"has {grammar.masks.size} words for {len(grammar.rows)} rows of {num_words} words each"
        )
    places = {row: place for place, row in enumerate(rows.tolist())}
    if not places.keys() >= set(grammar.rows):
        raise ProtocolError("GrammarOutput.rows", f"{grammar.rows} are not among the rows that sample, {rows.tolist()}")
    # A copy: what came from a socket is read-only.
    allowed = torch.from_numpy(np.array(grammar.masks).reshape(-1, num_words))
    index = to_device(torch.tensor([places[row] for row in grammar.rows]), logits.device)
    apply_token_mask(logits, to_device(allowed, logits.device), index)
    return index
