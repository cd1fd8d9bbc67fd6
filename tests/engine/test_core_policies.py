"""Time limits, the queue's bound in tokens, and bad settings, over the core's real sockets."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CoreConfig
from ipc.client import TokenClient
from ipc.errors import ConfigError, RequestError
from ipc.messages import RequestFailed, RequestOutput
from ipc.params import SamplingParams
from tests.engine.test_core import DEADLINE_S, RawClient, add, running_core


def await_ending(client: RawClient, request_id: str) -> str:
    """Its finish reason."""
    while True:
        output = client.hear()
        assert isinstance(output, RequestOutput)
        if output.request_id == request_id and output.finish_reason is not None:
            return output.finish_reason


def test_a_request_ends_with_what_it_has_when_its_time_is_over_running_waiting_or_without_workers(tmp_path: Path) -> None:
    with running_core(tmp_path, max_num_seqs=1) as engine:
        hold = threading.Event()
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        began = time.monotonic()
        client.ask(replace(add("runs", [1, 2, 3]), timeout_s=0.5))
        client.ask(replace(add("waits", [1, 2, 3]), timeout_s=0.2))
        assert await_ending(client, "waits") == "timeout" and 0.2 <= time.monotonic() - began < DEADLINE_S
        assert await_ending(client, "runs") == "timeout"
        stats = client.stats()
        assert stats["requests_running"] == stats["requests_waiting"] == 0
        hold.set()
        client.ask(replace(add("in time", [1, 2, 3]), timeout_s=60.0))
        assert await_ending(client, "in time") == "length"
        group.fail("made to", fatal=False)
        while client.stats()["kv_blocks_total"] != 0:
            pass
        group.stop()
        client.ask(replace(add("nobody there", [1]), timeout_s=0.2))
        assert await_ending(client, "nobody there") == "timeout"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_limit_that_makes_no_sense_is_refused(tmp_path: Path, timeout_s: float) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        client.ask(replace(add("a", [1]), timeout_s=timeout_s))
        failed = client.hear()
        assert isinstance(failed, RequestFailed) and (failed.code, failed.field) == ("bad_request", "timeout_s")
        group.stop()


def test_the_queue_is_bounded_in_tokens(tmp_path: Path) -> None:
    with running_core(tmp_path, max_num_seqs=1, max_queued_tokens=30) as engine:
        hold = threading.Event()
        group, client = engine.group(hold=hold), engine.client()
        client.attach()
        client.ask(add("runs", [1] * 3))
        while client.stats()["requests_running"] == 0:
            pass
        client.ask(add("waits", [1] * 20))
        client.ask(add("too much", [1] * 11))
        failed = client.hear()
        assert isinstance(failed, RequestFailed) and failed.request_id == "too much" and failed.code == "overloaded"
        assert "20 prompt tokens wait, with the 11 of this request" in failed.reason
        hold.set()
        assert await_ending(client, "waits") == "length"
        group.stop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "--max-num-batched-tokens: 8 is below --max-num-seqs=9"),
        ({"max_queued_tokens": 0}, "--max-queued-tokens: 0 must be at least 1"),
        ({"scheduling_policy": "fair"}, "--scheduling-policy: fair must be fcfs or priority"),
        ({"prefill_share": 0.0}, "--prefill-share: 0.0 must be above 0 and at most 1"),
    ],
)
def test_impossible_policies_are_refused_at_start(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CoreConfig(**{  # type: ignore[arg-type]
            "run_dir": "", "agent_pid": 1, "agent_start": 0, "key": "", "num_stages": 1, "model_name": "m",
            "vocab_size": 9, "model_max_len": 64, **change,
        })


def test_the_clients_offer_time_limits_and_the_cache_reset(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path) as engine:
        group = engine.group(hold=hold)
        with TokenClient(engine.address) as client:
            *_, last = client.generate([1, 2, 3], SamplingParams(max_tokens=5), timeout_s=0.3)
            assert last.finish_reason == "timeout"
            client.reset_prefix_cache()
            with pytest.raises(RequestError, match="timeout_s=0 must be a number of seconds above 0"):
                client.generate([1], timeout_s=0)
        hold.set()
        group.stop()
