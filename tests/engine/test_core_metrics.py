"""The core's own counts over its real sockets: a known run, refusals, and a worker group that is lost."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path

from engine.metrics_text import render_metrics
from ipc.codec import PROTOCOL_VERSION
from ipc.messages import AbortRequest, RequestFailed
from ipc.params import SamplingParams
from tests.engine.test_core import RawClient, add, running_core
from tests.prometheus import Samples, counters, parse


def scrape(client: RawClient) -> bytes:
    return render_metrics(client.stats())


def test_a_known_run_has_known_counts(tmp_path: Path) -> None:
    with running_core(tmp_path) as engine:
        group, client = engine.group(), engine.client()
        client.attach()
        empty = parse(scrape(client))
        assert empty["brigade_time_to_first_token_seconds_count"] == empty["brigade_generation_tokens_total"] == 0
        assert empty["brigade_requests_finished_total", "reason=length"] == 0
        assert empty["brigade_ready"] == 1 and empty["brigade_num_stages"] == 2
        for number, num_tokens in enumerate((8, 5, 1)):
            client.ask(add(f"{number}", [1, 2, 3, 4 + number], max_tokens=num_tokens))
            assert client.collect(f"{number}")[1] == "length"
        client.ask(add("several", [9, 8, 7], max_tokens=4, n=2))
        ended = 0
        while ended < 2:
            ended += client.hear().finish_reason is not None
        samples = parse(scrape(client))
        assert samples["brigade_requests_finished_total", "reason=length"] == 5
        assert samples["brigade_generation_tokens_total"] == 8 + 5 + 1 + 2 * 4
        assert samples["brigade_prompt_tokens_total"] == 3 * 4 + 2 * 3
        assert samples["brigade_time_to_first_token_seconds_count"] == samples["brigade_queue_seconds_count"] == 5
        assert samples["brigade_inter_token_seconds_count"] == 22 - 5
        assert samples["brigade_end_to_end_seconds_count"] == 5
        assert samples["brigade_kv_blocks_free"] == samples["brigade_kv_blocks_total"] == 64
        assert samples["brigade_requests_running"] == samples["brigade_requests_waiting"] == 0
        assert 0 < samples["brigade_time_to_first_token_seconds_sum"] <= samples["brigade_end_to_end_seconds_sum"]
        assert samples["brigade_queue_seconds_sum"] <= samples["brigade_time_to_first_token_seconds_sum"]
        assert samples["brigade_stage_resident_bytes", "stage=1"] == 1234
        group.stop()


def test_refusals_and_endings_are_counted_by_their_kind(tmp_path: Path) -> None:
    hold = threading.Event()
    with running_core(tmp_path, max_num_seqs=1, max_queued_requests=2) as engine:
        group, client, guest = engine.group(hold=hold), engine.client(), engine.client()
        client.attach()
        guest.attach()
        client.ask(add("runs", [1], max_tokens=50))
        for bad in (add("empty", []), add("runs", [1])):
            client.ask(bad)
            assert isinstance(client.hear(), RequestFailed)
        client.socket.send_multipart([bytes((PROTOCOL_VERSION,)), b"\xff", b"\x90"])
        assert isinstance(client.hear(), RequestFailed)
        client.ask(replace(add("params", [1]), params=SamplingParams(bad_words=("no",))))
        assert isinstance(client.hear(), RequestFailed)
        client.ask(add("waits", [1]))
        client.ask(replace(add("late", [1]), timeout_s=0.01))
        client.ask(add("too many", [1]))
        assert {client.hear().request_id for _ in range(2)} == {"too many", "late"}
        client.ask(AbortRequest(request_id="waits", reason="stop"))
        assert client.collect("waits")[1] == "stop"
        client.ask(AbortRequest(request_id="runs"))
        assert client.collect("runs")[1] == "abort"
        samples = parse(scrape(client))
        refused = {code: samples["brigade_requests_refused_total", f"code={code}"] for code in ("bad_request", "duplicate", "overloaded")}
        assert refused == {"bad_request": 3, "duplicate": 1, "overloaded": 1}
        finished = {
            reason: samples["brigade_requests_finished_total", f"reason={reason}"]
            for reason in ("stop", "length", "abort", "timeout", "error", "disconnect")
        }
        assert finished == {"stop": 1, "length": 0, "abort": 1, "timeout": 1, "error": 0, "disconnect": 0}
        hold.set()
        group.stop()


def test_counters_only_grow_when_the_workers_are_lost(tmp_path: Path) -> None:
    hold = threading.Event()
    hold.set()
    with running_core(tmp_path) as engine:
        group, client, watcher = engine.group(hold=hold), engine.client(), engine.client()
        client.attach()
        client.ask(add("before", [1, 2, 3]))
        assert client.collect("before")[1] == "length"
        scrapes = [counters(scrape(watcher))]
        hold.clear()
        client.ask(add("lost", [1]))
        while watcher.stats()["requests_running"] == 0:
            pass
        group.fail("made to", fatal=False)
        hold.set()
        while watcher.stats()["ready"]:
            pass
        scrapes.append(counters(scrape(watcher)))
        group.stop()
        second = engine.group()
        assert client.collect("lost")[1] == "length"
        scrapes.append(counters(scrape(watcher)))
        for earlier, later in itertools.pairwise(scrapes):
            assert_grew(earlier, later)
        assert [s["brigade_worker_restarts_total"] for s in scrapes] == [0, 1, 1]
        assert [s["brigade_requests_finished_total", "reason=length"] for s in scrapes] == [1, 1, 2]
        assert [s["brigade_requests_resumed_total"] for s in scrapes] == [0, 1, 1]
        assert [s["brigade_requests_finished_total", "reason=error"] for s in scrapes] == [0, 0, 0]
        assert scrapes[2]["brigade_generation_tokens_total"] >= 16
        second.stop()


def assert_grew(earlier: Samples, later: Samples) -> None:
    shrunk = {key: (value, later.get(key)) for key, value in earlier.items() if later.get(key, -1) < value}
    assert shrunk == {}
