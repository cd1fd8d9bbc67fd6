"""How do the masks that the core sends act on a step's logits?

Before everything else that changes logits: filters and penalties choose among the tokens that the grammar allows.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ProtocolError
from ipc.messages import GrammarOutput
from kernels.token_mask import apply_token_mask
from worker.transfer import to_device


def masked_logits(logits: Tensor, rows: NDArray[np.int64], grammar: GrammarOutput | None) -> Tensor:
    """Logits to choose tokens from: those of forbidden tokens are -inf in rows with a mask.

    Shapes:
        logits: [S', V] float32 of ``rows``; not changed, log probabilities are still of what the model said
        returns [S', V], the same tensor where there is no mask

    Raises ProtocolError when masks are for rows that don't sample, or not of this vocabulary.
    """
    if grammar is None or not grammar.rows:
        return logits
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
    index = torch.tensor([places[row] for row in grammar.rows])
    masked = logits.clone()
    apply_token_mask(masked, to_device(allowed, logits.device), to_device(index, logits.device))
    return masked
