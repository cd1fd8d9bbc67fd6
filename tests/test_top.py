"""Does `brigade top` show what an engine counts, keep its screen when the engine goes away, and give the terminal back?"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import Control
from ipc.views import RequestsReply, RequestState
from scripts.top.drawing import Choices, console_of, frame, write_picture
from scripts.top.model import History, View
from scripts.top.reading import Reading
from tests.fake_core import CORE_ID, FakeCore, model_info
from tests.terminal import CTRL_C, ROOT, Terminal

STATS: dict[str, Any] = {
    "epoch": 2, "num_stages": 2, "requests_running": 3, "requests_waiting": 1, "kv_blocks_total": 200, "kv_blocks_free": 150,
    "steps_in_flight": 3, "num_cohorts": 2, "worker_restarts_total": 1, "preemptions_total": 4, "generation_tokens_total": 1000,
    "prompt_tokens_total": 5000, "prefix_cache_query_tokens_total": 400, "prefix_cache_hit_tokens_total": 100,
    "draft_tokens_total": 50, "accepted_draft_tokens_total": 20, "core_cpu_s": 10.0,
}  # fmt: skip


def stage(rank: int, **changes: float) -> dict[str, Any]:
    """One that worked for 6 s of 10 and waited 4 s for activations."""
    values = {
        "steps": 100, "busy_s": 6.0, "plan_wait_s": 0.0, "receive_wait_s": 4.0, "token_wait_s": 0.0, "send_wait_s": 0.0,
        "mask_wait_s": 0.0, "busy_share": 0.6, "plan_wait_share": 0.0, "receive_wait_share": 0.4, "token_wait_share": 0.0,
        "send_wait_share": 0.0, "mask_wait_share": 0.0, "full_graph_steps": 40, "piecewise_graph_steps": 10, "tokens": 800,
        "padding_share": 0.25, "queue_depth": 1, "resident_bytes": 1 << 28,
    } | changes  # fmt: skip
    return {f"stage_{rank}_{name}": value for name, value in values.items()}


def requests(control_id: int = 1, **fields: Any) -> RequestsReply:
    base: dict[str, Any] = {
        "core_id": CORE_ID, "control_id": control_id, "num_open": 3, "clients": ("brigade-python 0.0a", "bench \x1b[31m 0.0b"),
        "request_ids": ("chatcmpl-1234567890abcdef", "r", "r"), "client_indices": [0, 1, 1], "indices": [0, 0, 1],
        "states": [int(RequestState.ANSWER), int(RequestState.PREEMPTED), 77], "ages_ms": [1500, 200_000, 7_300_000],
        "num_prompt_tokens": [12, 300, 300], "num_cached_tokens": [0, 256, 0], "num_output_tokens": [7, 1, 0],
        "num_preemptions": [0, 2, 0],
    }  # fmt: skip
    return RequestsReply(**base | fields)


def reading(at: float, stats: dict[str, Any], **fields: Any) -> Reading:
    base: dict[str, Any] = {"model": model_info(), "health": {"ready": True, "state": "ready"}, "requests": requests()}
    return Reading(at=at, stats=stats, **base | fields)


def later() -> View:
    """Two seconds later: 60 tokens more, and each stage 20 steps in 2 s."""
    history = History("tcp://x:1")
    history.view(reading(100.0, STATS | stage(0) | stage(1)))
    grown = {"generation_tokens_total": 1060, "prompt_tokens_total": 5100, "prefix_cache_query_tokens_total": 500,
             "prefix_cache_hit_tokens_total": 150, "core_cpu_s": 10.1}  # fmt: skip
    more = {"steps": 120, "busy_s": 7.5, "receive_wait_s": 4.5, "full_graph_steps": 45, "tokens": 860}
    return history.view(reading(102.0, STATS | grown | stage(0, **more) | stage(1, **more)))


def drawn(view: View | None, problem: str | None = None, **options: Any) -> str:
    class Sink:
        text = ""

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            """Nothing to do."""

        def isatty(self) -> bool:
            return False

    sink = Sink()
    console_of(sink, is_plain=True).print(frame(view, problem, options.pop("choices", Choices()), **options))  # type: ignore[arg-type]
    return sink.text


# ------------------------------------------------------------------------------------------------------------ numbers


def test_rates_are_what_was_gained_by_the_time_it_took() -> None:
    view = later()
    assert (view.generation_tokens_per_s, view.prompt_tokens_per_s, view.preemptions_per_s) == (30, 50, 0)
    assert (view.prefix_hit_share, view.prefix_hit_share_now, view.accepted_share) == (0.3, 0.5, 0.4)
    assert view.core_share == pytest.approx(0.05) and view.kv_share == 0.25
    first = view.stages[0]
    assert (first.step_ms, first.busy_ms, first.steps_per_s, first.tokens_per_s) == (100, 75, 10, 30)
    assert first.graph == 0.25 and first.waits["activations"] == 0.4


def test_a_stage_that_has_not_reported_since_keeps_its_numbers() -> None:
    history = History("a")
    history.view(reading(1.0, STATS | stage(0)))
    shown = history.view(reading(2.0, STATS | stage(0, steps=120, busy_s=8.0))).stages[0]
    assert history.view(reading(2.5, STATS | stage(0, steps=120, busy_s=8.0))).stages[0] == shown
    assert shown.step_ms == 100


def test_rates_begin_anew_with_another_core_and_another_epoch() -> None:
    history = History("a")
    history.view(reading(1.0, STATS | stage(0)))
    other = history.view(reading(2.0, {**STATS, "generation_tokens_total": 5} | stage(0, steps=1, busy_s=0.1), model=model_info(core_id=8)))
    assert other.generation_tokens_per_s is None and other.stages[0].step_ms is None
    history.view(reading(3.0, STATS | stage(0)))
    restarted = history.view(reading(4.0, STATS | stage(0, steps=2, busy_s=0.5, receive_wait_s=0.0)))
    assert restarted.stages[0].step_ms is None and restarted.stages[0].tokens_per_s == 0


# ------------------------------------------------------------------------------------------------------------ drawing


def test_a_frame_has_all_that_was_counted() -> None:
    text = drawn(later())
    for words in (
        "brigade fake", "ready", "2 stages", "epoch 2", "1 restarts", "generated 30.0 tokens/s", "prompts 50.0 tokens/s",
        "3 running, 1 waiting", "25% of 200", "prefix hits 30%, now 50%", "preemptions 4", "drafts kept 40% of 50",
        "in flight 3 steps, 2 cohorts", "requests, oldest first: 3 open", "chatcmpl-123456…", "preempted", "state 77", "1.5 s",
        "3 min 20 s", "2 h 01 min", "r [1]",
    ):  # fmt: skip
        assert words in text, words
    rows = [line.split() for line in text.splitlines() if line.startswith("    0 ") or line.startswith("0 ")]
    assert rows[0][0] == "0" and rows[0][2:] == ["60%", "0%", "40%", "0%", "0%", "0%", "100.0", "75.0", "10.0", "30", "25%", "256"]
    assert "\x1b" not in text, "neither colour nor another client's escape sequences"


def test_a_narrow_screen_has_fewer_columns_and_none_that_is_cut() -> None:
    text = drawn(later(), width=80)
    assert max(map(len, (line.rstrip() for line in text.splitlines() if "──" not in line))) <= 80
    assert "…" not in text.replace("chatcmpl-123456…", "") and "0.0a" not in text
    rows = [line.split() for line in text.splitlines() if line.startswith("    0 ")]
    assert rows[0][2:] == ["60%", "0%", "40%", "0%", "0%", "0%", "100.0", "30"]


def test_parts_can_be_hidden_and_requests_are_cut_to_the_screen() -> None:
    assert "ms/step" not in drawn(later(), choices=Choices(pipeline=False))
    assert "oldest first" not in drawn(later(), choices=Choices(requests=False))
    cut = drawn(later(), num_rows=1)
    assert "3 open, 2 not shown" in cut and "r [1]" not in cut
    assert "does not tell of its requests" in drawn(replace(later(), num_open=None, requests=()))
    assert "no answer: gone" in drawn(None, "gone") and "waiting for an engine" in drawn(None, "gone")
    assert "no stage has reported yet" in drawn(replace(later(), stages=()))


def test_a_picture_is_an_svg(tmp_path: Path) -> None:
    write_picture(tmp_path / "top.svg", later())
    text = (tmp_path / "top.svg").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}, "fetches nothing"
    assert text.startswith("<svg") and "brigade" in text and "activ." in text


# ------------------------------------------------------------------------------------------------------- the command


def answers() -> dict[str, Any]:
    stats = STATS | stage(0) | stage(1)
    return {"stats": stats, "health": {"ready": True, "state": "ready"}, "requests": lambda m: requests(m.control_id)}


@contextmanager
def core(**changes: Any) -> Iterator[FakeCore]:
    with FakeCore(info=model_info(), answers=answers() | changes) as made:
        yield made


def top(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scripts.cli", "top", "--interval", "0.1", *words], cwd=ROOT, timeout=60, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_without_a_terminal_it_prints_one_plain_frame() -> None:
    with core() as made:
        done = top(made.address)
        assert (done.returncode, done.stderr) == (0, "")
        assert "3 running, 1 waiting" in done.stdout and "\x1b" not in done.stdout
        assert "requests" in [made.next(Control)[1].op for _ in range(3)]


def test_numbers_for_machines(tmp_path: Path) -> None:
    with core() as made:
        done = top("--connect", made.address, "--json", "--svg", str(tmp_path / "x.svg"))
    data = json.loads(done.stdout)
    assert data["kv_share"] == 0.25 and data["stages"][1]["busy"] == 0.6 and data["generation_tokens_per_s"] == 0
    assert [line["state"] for line in data["requests"]] == ["answer", "preempted", "state 77"]
    assert (tmp_path / "x.svg").is_file()


def test_once_prints_its_frame_beside_a_picture_too(tmp_path: Path) -> None:
    with core() as made:
        done = top("--connect", made.address, "--once", "--svg", str(tmp_path / "x.svg"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 running, 1 waiting" in done.stdout and (tmp_path / "x.svg").is_file()


def test_an_engine_of_before_tells_nothing_of_requests() -> None:
    with core() as made:
        del made.answers["requests"]
        assert json.loads(top(made.address, "--json").stdout)["num_open"] is None


@pytest.mark.parametrize(("address", "code", "said"), [("nowhere", 2, "must be tcp://HOST:PORT"), (None, 3, "no engine answered")])
def test_exit_codes(address: str | None, code: int, said: str) -> None:
    with FakeCore(answers_attach=False) as silent:
        # An address where nobody greets; the real time to wait is ten seconds.
        done = top(address or silent.address, "--once")
    assert done.returncode == code and said in done.stderr and done.stdout == ""


def test_the_live_screen_has_keys_and_waits_for_an_engine_that_is_away() -> None:
    with core() as made, Terminal("top", "--interval", "0.1", made.address) as terminal:
        terminal.expect("3 running, 1 waiting")
        terminal.expect("q quit")
        terminal.type("p")
        while "ms/step" in terminal.expect("q quit"):
            continue
        terminal.type("r")
        while "oldest first" in terminal.expect("q quit"):
            continue
        made.die()
        terminal.expect("no answer")
        with core(stats=answers()["stats"] | {"requests_running": 9}) as other:
            other._post(lambda: other._router.bind(made.address))
            terminal.expect("9 running, 1 waiting")
            terminal.type("q")
            code, rest = terminal.end()
        assert code == 0 and "Traceback" not in rest
        assert "\x1b[?1049h" in terminal.raw and "\x1b[?1049l" in terminal.raw, "the screen before comes back"


def test_ctrl_c_leaves_the_live_screen() -> None:
    with core() as made, Terminal("top", "--interval", "0.1", made.address) as terminal:
        terminal.expect("3 running")
        terminal.type(CTRL_C)
        code, rest = terminal.end()
        assert code == 0 and "Traceback" not in rest


def test_a_wrong_address_ends_the_live_screen() -> None:
    with Terminal("top", "nowhere") as terminal:
        code, rest = terminal.end()
        assert code == 2 and "must be tcp://HOST:PORT" in rest
