"""What clients can say and see of the prefix cache, over the core's real sockets."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.messages import AddRequest, Control, ControlReply, RequestOutput
from ipc.params import SamplingParams
from tests.engine.test_core import RawClient, running_core
from tests.fake_group import FakeGroup
from tests.fakes import expected_output

PROMPT = np.arange(10, 22, dtype=np.int32)


@contextmanager
def stopping(group: FakeGroup) -> Iterator[FakeGroup]:
    try:
        yield group
    finally:
        group.stop()


def cached(client: RawClient, request_id: str, **params: Any) -> int:
    """Run the prompt; its answer must be right. How many of its tokens were there already."""
    wanted = SamplingParams(**({"max_tokens": 2, "seed": 1} | params))
    client.ask(AddRequest(request_id=request_id, prompt_token_ids=PROMPT, params=wanted))
    tokens: list[int] = []
    while True:
        output = client.hear()
        assert isinstance(output, RequestOutput)
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            expected = expected_output(PROMPT.tolist(), wanted, eos_token_ids=frozenset(), max_model_len=64)
            assert (tokens, output.finish_reason) == expected[:2]
            return output.num_cached_tokens


def test_salt_opt_out_and_reset_reach_the_cache_and_hits_are_told(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine, stopping(engine.group()) as group:
        client = engine.client()
        client.attach()
        assert [cached(client, "a"), cached(client, "b")] == [0, 8]
        assert cached(client, "c", prefix_caching=False) == 0
        assert [cached(client, "d", cache_salt="x"), cached(client, "e", cache_salt="x")] == [0, 8]
        assert cached(client, "f", cache_salt="y") == 0
        stats = client.stats()
        assert stats["prefix_cache_query_tokens_total"] == 5 * 12
        assert stats["prefix_cache_hit_tokens_total"] == 16
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"], "what is only cached counts as free"
        client.ask(Control(control_id=9, op="reset_prefix_cache"))
        reply = client.hear()
        assert isinstance(reply, ControlReply) and (reply.control_id, reply.error) == (9, "")
        assert [cached(client, "g"), cached(client, "h")] == [0, 8]
        assert all(new.params.cache_salt is None for plan in group.plans for new in plan.new_requests)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_flag_turns_it_off(tmp_path: Path, enabled: bool) -> None:
    with running_core(tmp_path, prefix_caching=enabled) as engine, stopping(engine.group()):
        client = engine.client()
        client.attach()
        assert [cached(client, "a"), cached(client, "b")] == [0, 8 if enabled else 0]
