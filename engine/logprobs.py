"""Which part of a step's log probabilities belongs to which request, and which of it is new to the client?"""

from itertools import accumulate

from engine.request import Request
from ipc.errors import ProtocolError, RequestError
from ipc.messages import LogprobColumns, TokenLogprobs


def rows_of(columns: LogprobColumns | None, path: str) -> dict[int, TokenLogprobs]:
    """One part per row, as views of the columns' buffers. Raises ProtocolError when lengths do not add up."""
    if columns is None:
        return {}
    if not len(columns.rows) == len(columns.starts) == len(columns.num_positions) == len(columns.num_top):
        raise ProtocolError(path, "has columns of different lengths")
    sizes = [count * (1 + top) for count, top in zip(columns.num_positions, columns.num_top, strict=True)]
    totals = (sum(sizes), sum(sizes), sum(columns.num_positions))
    if totals != (len(columns.token_ids), len(columns.logprobs), len(columns.ranks)):
        raise ProtocolError(path, f"has buffers that do not hold {totals} values")
    entries = accumulate(sizes, initial=0)
    positions = accumulate(columns.num_positions, initial=0)
    return {
        row: TokenLogprobs(
            start=start,
            num_top=top,
            token_ids=columns.token_ids[entry : entry + size],
            logprobs=columns.logprobs[entry : entry + size],
            ranks=columns.ranks[position : position + count],
        )
        for row, start, count, top, size, entry, position in zip(
            columns.rows, columns.starts, columns.num_positions, columns.num_top, sizes, entries, positions, strict=False
        )
    }


def untold_part(request: Request, piece: TokenLogprobs) -> TokenLogprobs | None:
    """The positions of a prompt piece that the client does not have yet; a recomputed prompt brings old ones again.

    Marks them as told. Raises RequestError when positions are missing between what was told and the piece.
    """
    told = request.num_prompt_logprobs_told
    end = piece.start + len(piece.ranks)
    if piece.start > told or end > request.num_prompt_tokens:
        raise RequestError(
            f"prompt logprobs for positions {piece.start} to {end} came where {told} was due", code="internal"
        )
    if end <= told:
        return None
    request.num_prompt_logprobs_told = end
    skip = told - piece.start
    width = 1 + piece.num_top
    return TokenLogprobs(
        start=told,
        num_top=piece.num_top,
        token_ids=piece.token_ids[skip * width :],
        logprobs=piece.logprobs[skip * width :],
        ranks=piece.ranks[skip:],
    )
