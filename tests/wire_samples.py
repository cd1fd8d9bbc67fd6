"""One message of each kind with every field set, and the stored bytes of each (tests/golden/wire.txt).

    python -m tests.wire_samples        writes the file again: look at its diff, it is a change of the protocol
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from ipc import messages as m
from ipc import views as v
from ipc.codec import encode
from ipc.params import SamplingParams

FILE = Path(__file__).parent / "golden" / "wire.txt"

PARAMS = SamplingParams(
    max_tokens=5, temperature=0.5, top_k=4, top_p=0.25, seed=9, stop=("a", "é"), stop_token_ids=(3, 4), ignore_eos=True,
    include_stop_str_in_output=True, skip_special_tokens=False, logprobs=2, prompt_logprobs=0,
    prefix_caching=False, cache_salt="é", structured={"regex": "a|é"},
    min_p=0.125, typical_p=0.75, presence_penalty=0.5, frequency_penalty=-0.5,
    repetition_penalty=1.25, min_tokens=2, logit_bias={3: -100, 70000: 0.5}, allowed_token_ids=(1, 70000), bad_words=("é",),
    bad_word_ids=((5, 6), (7,)), logprobs_mode="processed", n=2, echo=True, logits_processors={"a:b": {"strength": 0.5, "on": True}},
)  # fmt: skip


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def spans(*values: int) -> Any:
    return np.array(values, np.int64)


GROUP = m.KVCacheGroup(kind="window", layers=[0, 2, 4], window=16)
LOGPROBS = m.TokenLogprobs(start=3, num_top=1, token_ids=ids(5, 6), logprobs=floats(-0.5, -1.0), ranks=ids(1))
COLUMNS = m.LogprobColumns(
    rows=[3], starts=[7], num_positions=[1], num_top=[1], token_ids=ids(5, 6), logprobs=floats(-0.5, -1.0), ranks=ids(2)
)

SAMPLES: list[Any] = [
    m.WorkerHello(rank=1, world_size=2, local_world_size=2, nonce=77, pid=99, host="h", key="k", token_address="ipc://t"),
    m.EpochStart(
        core_id=1, epoch=2, nonce=77, core_pid=9, core_host="h", store="/s", token_address="ipc://t", ranks_on_host=2,
        token_key=5,
    ),
    m.WorkerLoaded(
        core_id=1, epoch=2, rank=1, groups=(GROUP,), bytes_per_block=4096, free_bytes=1 << 33, device="cpu",
        weight_bytes=1 << 20, load_s=0.5, num_threads=2, step_bytes=1 << 21,
    ),
    m.KVCacheConfig(core_id=1, epoch=2, num_blocks=300, block_size=16, max_model_len=1024, groups=(GROUP,)),
    m.WorkerReady(core_id=1, epoch=2, rank=1, kv_bytes=1 << 24, warmup_s=0.25),
    m.WorkerFailed(core_id=1, epoch=2, rank=1, cause="out of memory", fatal=True),
    m.Shutdown(core_id=1, epoch=2, reason="drained", exit_code=1),
    m.Heartbeat(core_id=1, epoch=2),
    m.StageReport(
        core_id=1, epoch=2, rank=1, num_steps=12, busy_s=1.5, plan_wait_s=0.5, receive_wait_s=0.25, token_wait_s=0.0,
        queue_depth=2, resident_bytes=1 << 28, send_wait_s=0.125, num_full_graph_steps=9, num_piecewise_graph_steps=2,
        num_tokens=300, num_padded_tokens=20, mask_wait_s=0.5,
    ),
    m.SchedulerOutput(
        core_id=1, epoch=2, step_id=10, freed_rows=[5],
        new_requests=(
            m.NewRequestData(
                row=6, request_id="r", token_ids=ids(1, 70000), num_prompt_tokens=2, num_computed_tokens=0,
                block_ids=([1, 300],), params=PARAMS,
            ),
        ),
        cached_requests=m.CachedRequestData(indices=[0, 1], num_new_blocks=([1, 2],), new_block_ids=([300, 70000, 5],)),
        rows=[1, 2, 6], num_scheduled_tokens=[1, 1, 2], needs_tokens_of_step=9, has_grammar=True,
        drafts=m.DraftTokens(indices=[2], counts=[1], token_ids=[70000]), rejected=m.RejectedDrafts(indices=[1], counts=[3]),
    ),
    m.GrammarOutput(core_id=1, epoch=2, step_id=10, rows=[2, 6], masks=ids(-1, 3, 1 << 30, 0)),
    m.SampledTokens(epoch=2, step_id=10, rows=[1, 2, 6], token_ids=[7, 7, 7], counts=[1, 1, 1]),
    m.ModelRunnerOutput(
        core_id=1, epoch=2, step_id=10, rows=[1, 2], token_ids=[7, 70000], counts=[1, 1], logprobs=COLUMNS,
        prompt_logprobs=COLUMNS, nan_rows=[2],
    ),
    m.TimelineRequest(core_id=1, epoch=2, question_id=3, seconds=0.5),
    m.TimelineReport(
        core_id=1, epoch=2, rank=1, question_id=3, received_ns=1 << 60, replied_ns=-1, spans=spans(10, 7, 1 << 40, 1 << 41)
    ),
    m.Attach(client="test 1"),
    m.AddRequest(request_id="r", prompt_token_ids=ids(1, 2, 3), params=PARAMS, output_token_ids=ids(4), priority=-1,
        timeout_s=1.5, takes_updates=True, counts=[1, 0], indices=[0, 2]),
    m.AbortRequest(request_id="r", reason="stop", index=2),
    m.Control(control_id=8, op="stats", seconds=2.5),
    m.ModelInfo(
        core_id=1, version="0.1.0", name="m", num_stages=2, vocab_size=512, max_model_len=64, max_num_seqs=8,
        eos_token_ids=[1, 2], tokenizer=b"{}", tokenizer_config=b"{}", chat_template="t", generation_config=b"[]",
        logits_processors=("a:b",), sampling_defaults={"temperature": 0.5, "top_k": 3},
    ),
    m.RequestOutput(
        core_id=1, request_id="r", new_token_ids=[7], finish_reason="stop", stop_reason=7, num_prompt_tokens=3,
        num_output_tokens=2, seed=9, logprobs=LOGPROBS, prompt_logprobs=LOGPROBS, num_cached_tokens=16, index=3,
    ),
    m.TokenUpdates(
        core_id=1, request_ids=("r", "s"), counts=[1, 2], token_ids=[7, 8, 70000], num_output_tokens=[4, 9], indices=[0, 1],
    ),
    m.RequestFailed(core_id=1, request_id="r", code="bad_request", reason="top_p=2 must be …", field="top_p"),
    m.ControlReply(core_id=1, control_id=8, error="e", values={"running": 3, "share": 0.5, "name": "x", "ok": True}),
    m.TimelineReply(
        core_id=1, control_id=8, now_ns=1 << 41, seconds=0.5,
        lanes=(
            m.TimelineLane(rank=None, host="h", error="", clock_error_ns=0, spans=spans(32, -1, 0, 9, 37, 4, 9, 11)),
            m.TimelineLane(rank=1, host="h2", error="silent", clock_error_ns=7, spans=spans()),
        ),
    ),
    v.RequestsReply(
        core_id=1, control_id=8, num_open=700, clients=("a 0.01", "b 1.02"), request_ids=("r", "r", "s"),
        client_indices=[0, 0, 1], indices=[0, 1, 0], states=[5, 1, 0], ages_ms=[70000, 70000, 3], num_prompt_tokens=[300, 300, 4],
        num_cached_tokens=[16, 0, 0], num_output_tokens=[9, 0, 0], num_preemptions=[1, 0, 0],
    ),
]  # fmt: skip


def plain(value: Any) -> Any:
    """A message as lists and dicts that compare by value, also for arrays and nested parts."""
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def dump(message: Any) -> str:
    """Name, then a line for each frame: its bytes in hex, and for the head what they say."""
    frames = [bytes(frame) for frame in encode(message)]
    said = ["version", "tag", repr(msgpack.unpackb(frames[2])), *(f"buffer of {len(f)} bytes" for f in frames[3:])]
    lines = [f"{frame.hex(' ')}\n    {text}" for frame, text in zip(frames, said, strict=True)]
    return "\n".join([f"[{type(message).__name__}]", *lines]) + "\n"


def dump_all() -> str:
    return "\n".join(map(dump, SAMPLES))


if __name__ == "__main__":
    FILE.write_text(dump_all(), encoding="utf-8")
