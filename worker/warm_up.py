"""Which steps does a stage compute before anybody asks for one, so that no request pays for what is done once?

On a GPU kernels are compiled when they are first launched, a second each, and decodes have kernels of their own: one for
short contexts, and two for long ones, which are cut into parts. On a CPU libraries make what they keep for each kind of step.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ipc.messages import CachedRequestData, NewRequestData, SchedulerOutput
from ipc.params import SamplingParams

PREFILL_TOKENS = 8
"""Enough to go through every kernel of a prefill; thread pools are awake afterwards."""

SHORT, LONG = 2, 1026
"""Tokens of the contexts of decodes: one part, and several, which no backend makes longer than 512."""

GREEDY = SamplingParams(temperature=0.0, seed=0)
FILTERED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=0, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=0)


def rehearsals(max_model_len: int, num_groups: int, block_size: int) -> Iterator[SchedulerOutput]:
    """Decodes of a short and of a long context, sampled in different ways."""
    for length, params in ((SHORT, FILTERED), (LONG, DRAWN)):
        yield made_up_plan([min(length, max_model_len)], [1], block_size=block_size, num_groups=num_groups, params=params)


def first_step(max_model_len: int, num_groups: int, block_size: int, max_tokens: int) -> SchedulerOutput:
    """A prefill; also the first one that goes from stage to stage."""
    length = min(PREFILL_TOKENS, max_model_len - 1, max_tokens)
    return made_up_plan([length], [length], block_size=block_size, num_groups=num_groups, params=GREEDY)


def made_up_plan(
    lengths: Sequence[int],
    num_scheduled: Sequence[int],
    *,
    block_size: int,
    num_groups: int,
    params: SamplingParams,
    step_id: int = 0,
    freed_rows: Sequence[int] = (),
) -> SchedulerOutput:
    """New requests of these lengths, of each of which the last tokens are computed.

    They have the first rows, and block 0 for all of their tokens: nobody reads what they write.
    """
    requests = tuple(
        NewRequestData(
            row=row,
            request_id="made up",
            token_ids=np.zeros(length, np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=length - scheduled,
            block_ids=([0] * -(-length // block_size),) * num_groups,
            params=params,
        )
        for row, (length, scheduled) in enumerate(zip(lengths, num_scheduled, strict=True))
    )
    return SchedulerOutput(
        core_id=0,
        epoch=0,
        step_id=step_id,
        freed_rows=list(freed_rows),
        new_requests=requests,
        cached_requests=CachedRequestData(),
        rows=list(range(len(requests))),
        num_scheduled_tokens=list(num_scheduled),
        needs_tokens_of_step=0,
    )
