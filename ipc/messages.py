"""Every message that crosses a process boundary, with its sender, its receiver and its meaning.

Words, the same in the whole project:

    request   what a client asked for; has a ``request_id`` chosen by the client
    row       a request's stable place in the workers' persistent batch, from first schedule to finish or preemption
    block     unit of KV cache, ``block_size`` tokens
    slot      one token's place in it: ``block_id * block_size + offset``
    step      one SchedulerOutput, numbered by ``step_id`` from 1 in each epoch, run by every stage in the same order
    stage     one pipeline position
    cohort    one of the groups into which live decodes are split
    epoch     one life of the worker group, numbered from 1 by the core

Rules: tags are never reused; new fields go last and have defaults; nothing is pickled; no torch type travels.
``codec.py`` turns these types into frames and back, and checks every field on the way in.
"""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ipc.params import SamplingParams
from ipc.registry import message, part
from ipc.spans import MAX_SPANS, SPAN_FIELDS


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that the codec checks: values of an integer, or length of a text, of bytes or of a list."""

    low: int
    high: int


U16 = Annotated[int, Bounds(0, (1 << 16) - 1)]
U32 = Annotated[int, Bounds(0, (1 << 32) - 1)]
U64 = Annotated[int, Bounds(0, (1 << 64) - 1)]
Name = Annotated[str, Bounds(0, 256)]
Text = Annotated[str, Bounds(0, 1 << 16)]
RequestId = Annotated[str, Bounds(1, 128)]
Blob = Annotated[bytes, Bounds(0, 1 << 28)]

Ints = list[int]
"""A column of integers in [-2^31, 2^31); packed at the narrowest width that fits, one value when all are equal."""

IdBuffer = NDArray[np.int32]
"""A column as a raw frame of its own: little-endian int32, never copied into the head."""

FloatBuffer = NDArray[np.float32]
"""A raw frame of little-endian float32."""

MaskBuffer = NDArray[np.int32]
"""Bits as a raw frame of little-endian int32: bit i of word w of a row is token 32 w + i."""

SpanBuffer = NDArray[np.int64]
"""Spans (see spans.py) as a raw frame of little-endian int64, four to a span."""

FewSpans = Annotated[SpanBuffer, Bounds(0, SPAN_FIELDS * (MAX_SPANS + 1))]
"""What one recorder may hold."""

Nanoseconds = Annotated[int, Bounds(-(1 << 62), (1 << 62) - 1)]

Scalars = dict[str, int | float | str | bool]
"""A flat map of named values."""


# ---------------------------------------------------------------------------------------------- core and workers


@message(tag=1)
class WorkerHello:
    """worker -> core: a rank of the worker group is up and asks to be let into an epoch."""

    rank: U32
    world_size: U32
    local_world_size: U32
    nonce: U64
    """Random, drawn once per process: tells two lives of the same rank apart."""
    pid: U32
    host: Name
    """Same text on ranks that share memory and devices."""
    key: Name
    """What the core's owner published to its ranks; a hello with another key is not answered."""
    token_address: Text = ""
    """Where stage 0 receives SampledTokens; empty from other stages."""


@message(tag=2)
class EpochStart:
    """core -> worker: the group is complete; build the process group of this epoch, then load."""

    core_id: U64
    epoch: U32
    nonce: U64
    """Of the hello that this answers."""
    core_pid: U32
    core_host: Name
    store: Text
    """FileStore path (one agent), or prefix of the agent's store (several)."""
    token_address: Text
    """Stage 0's address for SampledTokens."""
    ranks_on_host: U32 = 1
    """Ranks that share the receiver's host, itself included, whichever agent started them: they share its cores."""
    token_key: U64 = 0
    """Drawn by the core for this epoch: what comes to that address without it in front is a stranger's."""


@part
class KVCacheGroup:
    """Layers that share block tables because their cache grows by the same rule."""

    kind: Name
    """Spec type: "full" or "window"; the ledger's rule for it."""
    layers: Ints
    """Global layer numbers."""
    window: U32 = 0
    """Tokens that a windowed layer looks back on, the current one included; 0 without a window."""


@message(tag=3)
class WorkerLoaded:
    """worker -> core: weights are in memory; this is what a KV block costs here and what is free."""

    core_id: U64
    epoch: U32
    rank: U32
    groups: tuple[KVCacheGroup, ...]
    bytes_per_block: U64
    """Over all of this stage's layers."""
    free_bytes: U64
    """Free on the device now, whoever else shares it."""
    device: Name
    weight_bytes: U64
    load_s: float
    num_threads: U32
    step_bytes: U64 = 0
    """What the largest step takes of the device beside weights and cache; 0 where that was not measured."""


@message(tag=4)
class KVCacheConfig:
    """core -> worker: make the cache tensors, warm up, and report ready."""

    core_id: U64
    epoch: U32
    num_blocks: U32
    block_size: U32
    max_model_len: U32
    groups: tuple[KVCacheGroup, ...]
    """Of the whole model; each stage keeps its own layers of them."""


@message(tag=5)
class WorkerReady:
    """worker -> core: cache made, links warm; steps may come."""

    core_id: U64
    epoch: U32
    rank: U32
    kv_bytes: U64
    warmup_s: float


@message(tag=6)
class WorkerFailed:
    """worker -> core: this rank is about to end, and why."""

    core_id: U64
    epoch: U32
    rank: U32
    cause: Text
    fatal: bool
    """True when no restart can cure it."""


@message(tag=7)
class Shutdown:
    """core -> worker: finish the step in progress and end."""

    core_id: U64
    epoch: U32
    reason: Text
    exit_code: Annotated[int, Bounds(0, 255)] = 0
    """0 when the engine was asked to end, 1 when it had to."""


@message(tag=8)
class Heartbeat:
    """core -> worker: answer to a StageReport, so that a rank knows that its core lives."""

    core_id: U64
    epoch: U32


@message(tag=9)
class StageReport:
    """worker -> core: once a second from the control thread: alive, and where this stage's time went.

    All times are seconds since the epoch began.
    """

    core_id: U64
    epoch: U32
    rank: U32
    num_steps: U64
    busy_s: float
    plan_wait_s: float
    receive_wait_s: float
    token_wait_s: float
    queue_depth: U32
    resident_bytes: U64
    send_wait_s: float = 0.0
    num_full_graph_steps: U64 = 0
    """Steps that were one graph. Those of neither kind ran eagerly."""
    num_piecewise_graph_steps: U64 = 0
    """Steps whose segments between attention calls were graphs."""
    num_tokens: U64 = 0
    """Computed in all steps, padding not counted."""
    num_padded_tokens: U64 = 0
    """Computed beside them, to give steps the shape of a graph."""
    mask_wait_s: float = 0.0


@part
class NewRequestData:
    """Everything that a worker is ever told about a request at once; after this come deltas only.

    Preemption and recovery are "row freed" and "new request" again, with the generated tokens behind the prompt.
    """

    row: U32
    request_id: RequestId
    token_ids: IdBuffer
    """Prompt, then what was generated so far."""
    num_prompt_tokens: U32
    num_computed_tokens: U32
    """Tokens whose keys and values are already in the blocks below."""
    block_ids: tuple[Ints, ...]
    """Per KV group; -1 where no token to come reads in a group with a window."""
    params: SamplingParams
    """``seed`` is always set: the core draws one where the client gave none."""


@part
class CachedRequestData:
    """Deltas for rows of this step that the workers know already: the blocks they gain.

    ``indices[i]`` is a position in the step's ``rows``; per KV group g, the next ``num_new_blocks[g][i]`` entries of
    ``new_block_ids[g]`` are appended to that row's table.
    """

    indices: Ints = field(default_factory=list)
    num_new_blocks: tuple[Ints, ...] = ()
    new_block_ids: tuple[Ints, ...] = ()


@part
class DraftTokens:
    """Guesses of the tokens behind the newest one of some rows, to be computed with it and verified.

    The next ``counts[i]`` of ``token_ids`` are drafts of row number ``indices[i]`` of the step, and part of its
    ``num_scheduled_tokens``. It samples behind its newest token and behind each draft; what it sampled counts up to the
    first token that is not the draft of its place, that token included.
    """

    indices: Ints
    counts: Ints
    token_ids: Ints


@part
class RejectedDrafts:
    """``counts[i]`` of the last drafts of row number ``indices[i]`` did not stand: so many less are computed and known."""

    indices: Ints
    counts: Ints


@message(tag=10)
class SchedulerOutput:
    """core -> worker: one step, the same bytes to every rank.

    Order of effects: rows are freed, new requests take rows, tables grow, rejected drafts are taken back, drafts join the
    known tokens, the batch is computed. For each row of the batch its next ``num_scheduled_tokens`` tokens are computed;
    when that reaches the last token known (or promised by an earlier step), the row samples one token.
    """

    core_id: U64
    epoch: U32
    step_id: U64
    freed_rows: Ints
    new_requests: tuple[NewRequestData, ...]
    cached_requests: CachedRequestData
    rows: Ints
    """The batch; rows that compute one token come first."""
    num_scheduled_tokens: Ints
    needs_tokens_of_step: U64
    """Newest step whose sampled tokens are inputs of this one, or which named a row that gets a new owner here; 0 for none."""
    has_grammar: bool = False
    """A promise to the last stage: a GrammarOutput for this step follows."""
    drafts: DraftTokens | None = None
    """Of rows with neither a grammar nor other rules that look at their own tokens."""
    rejected: RejectedDrafts | None = None
    """What was decided since these rows' last steps, which had drafts."""


@message(tag=15)
class GrammarOutput:
    """core -> last stage: which tokens the grammars allow in a step that was sent before.

    One follows each SchedulerOutput with ``has_grammar``, as soon as the core knows the tokens that the step's grammars
    depend on, while the step is computed; without rows when nobody waits for what they would sample any more.
    """

    core_id: U64
    epoch: U32
    step_id: U64
    rows: Ints
    """Those of the step's sampling rows that have a mask; all others may sample any token."""
    masks: MaskBuffer
    """A mask for each row, one after the other: a bit for each token of the vocabulary, rounded up to whole words."""


@message(tag=11)
class SampledTokens:
    """last stage -> stage 0, past the core: the inputs of steps to come. One per step, also when empty."""

    epoch: U32
    step_id: U64
    rows: Ints
    token_ids: Ints
    """``counts[i]`` tokens for ``rows[i]``, flat."""
    counts: Ints
    """One, and one more for each draft of the row that stood."""


@part
class LogprobColumns:
    """Log probabilities for some positions of some rows.

    Row i has ``num_positions[i]`` positions, the first of which is token number ``starts[i]`` of its sequence; each
    position has ``1 + num_top[i]`` entries in the buffers: the token itself, then the most likely ones in order.
    """

    rows: Ints
    starts: Ints
    num_positions: Ints
    num_top: Ints
    token_ids: IdBuffer
    logprobs: FloatBuffer
    ranks: IdBuffer
    """One per position: how many tokens are at least as likely as the position's own, itself included."""


@message(tag=12)
class ModelRunnerOutput:
    """last stage -> core: what a step produced."""

    core_id: U64
    epoch: U32
    step_id: U64
    rows: Ints
    """Rows that sampled, in batch order."""
    token_ids: Ints
    """``counts[i]`` tokens for ``rows[i]``, flat."""
    counts: Ints
    """As in SampledTokens."""
    logprobs: LogprobColumns | None = None
    prompt_logprobs: LogprobColumns | None = None
    nan_rows: Ints = field(default_factory=list)
    """Rows whose logits held a NaN: their requests end with an error."""


@message(tag=13)
class TimelineRequest:
    """core -> worker: what did the main thread do in the last seconds? Answered with TimelineReport."""

    core_id: U64
    epoch: U32
    question_id: U64
    seconds: float


@message(tag=14)
class TimelineReport:
    """worker -> core: the spans that were asked for, on the worker's own clock.

    The two times tell the core how far the clocks of two hosts are apart.
    """

    core_id: U64
    epoch: U32
    rank: U32
    question_id: U64
    received_ns: Nanoseconds
    """When the question arrived."""
    replied_ns: Nanoseconds
    """When this was sent."""
    spans: FewSpans


# ---------------------------------------------------------------------------------------------- core and clients


@message(tag=32)
class Attach:
    """client -> core: who are you? Answered with ModelInfo."""

    client: Name = ""
    """Name and version of the client library, for the log."""


@message(tag=33)
class AddRequest:
    """client -> core: generate. Answered with RequestOutput messages, or one RequestFailed.

    With ``params.n`` above 1 each choice has outputs of its own, told apart by their index, and a last one. The request
    is over when all of its choices are.
    """

    request_id: RequestId
    """Unique among this client's open requests."""
    prompt_token_ids: IdBuffer
    params: SamplingParams
    output_token_ids: IdBuffer = field(default_factory=lambda: np.zeros(0, np.int32))
    """On resubmission: what was received before; generation goes on behind it. Of several choices one after the other."""
    priority: Annotated[int, Bounds(-(1 << 31), (1 << 31) - 1)] = 0
    """With ``--scheduling-policy priority``: the lowest number runs first."""
    timeout_s: float | None = None
    """Seconds from its arrival at the core, after which the request ends with reason "timeout" and what it has."""
    takes_updates: bool = False
    """Whether the client reads TokenUpdates."""
    counts: Ints = field(default_factory=list)
    """On resubmission with ``params.n`` above 1: how many of ``output_token_ids`` each choice has that is still open."""
    indices: Ints = field(default_factory=list)
    """Which choices these are, in ascending order."""


@message(tag=34)
class AbortRequest:
    """client -> core: end a request; harmless in every state, also for ids that are unknown or over."""

    request_id: RequestId
    reason: Name = "abort"
    """Becomes the finish reason: "abort", or "stop" when a stop string matched."""
    index: U32 | None = None
    """Ends this one of the request's choices alone; None ends them all."""


@message(tag=35)
class Control:
    """client -> core: a question about the engine. Answered with ControlReply."""

    control_id: U64
    op: Name
    """"stats", "health", "reset_prefix_cache" (forget what finished requests left), "timeline", or "requests"
    (answered with RequestsReply of views.py)."""
    seconds: float = 1.0
    """How far back a timeline goes."""


@message(tag=48)
class ModelInfo:
    """core -> client: what is served, its limits, and all that a client needs to turn text into tokens and back."""

    core_id: U64
    version: Name
    name: Text
    num_stages: U32
    vocab_size: U32
    max_model_len: U32
    """Most tokens of a prompt and its answer together."""
    max_num_seqs: U32
    eos_token_ids: Ints
    tokenizer: Blob
    """A ``tokenizer.json`` of the tokenizers library; empty when the model came without one."""
    tokenizer_config: Blob
    """JSON object: special tokens, add_bos_token, and what else the model's tokenizer_config.json holds."""
    chat_template: str | None = None
    generation_config: Blob = b"{}"
    logits_processors: tuple[Name, ...] = ()
    """Names of those that requests may ask for."""
    sampling_defaults: Scalars = field(default_factory=dict)
    """What parameters get that a request leaves unset, by name: the model's defaults, else the engine's."""


@part
class TokenLogprobs:
    """Log probabilities of consecutive tokens of one request; layout as in LogprobColumns."""

    start: U32
    num_top: U32
    token_ids: IdBuffer
    logprobs: FloatBuffer
    ranks: IdBuffer


@message(tag=49)
class RequestOutput:
    """core -> client: new tokens of one request; the last one carries the finish reason."""

    core_id: U64
    request_id: RequestId
    new_token_ids: Ints
    """With the finish reason "stop" the last of them is the end token or stop id; a message without any ends behind text."""
    finish_reason: Name | None = None
    """None while it goes on; then "stop" (end token, stop id, stop string, an answer whose grammar is complete), "length",
    "abort" or "timeout"."""
    stop_reason: U32 | None = None
    """The stop token id that ended it; None for the model's own end token and otherwise."""
    num_prompt_tokens: U32 = 0
    num_output_tokens: U32 = 0
    """All so far, those of this message included."""
    seed: U64 = 0
    """The seed in use: the client's, or the one drawn by the core."""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    num_cached_tokens: U32 = 0
    """Of the prompt, those that the prefix cache had when the request first ran."""
    index: U32 = 0
    """Which of the request's ``n`` choices this is of. Prompt log probabilities come with choice 0 only."""


@message(tag=53)
class TokenUpdates:
    """core -> client: what one step brought several requests that go on; a RequestOutput for each would cost ten times more.

    For requests that take updates, behind their first RequestOutput and before their last. What isn't told here is as it
    was told before.
    """

    core_id: U64
    request_ids: tuple[RequestId, ...]
    counts: Ints
    """New tokens of each."""
    token_ids: Ints
    """Those of the first request, then of the second, and so on."""
    num_output_tokens: Ints
    """All so far of each, those of this message included."""
    indices: Ints = field(default_factory=list)
    """Which choice each is of; left out when all are 0."""


@message(tag=50)
class RequestFailed:
    """core -> client: this request is over with an error, with all of its choices; nothing more will come."""

    core_id: U64
    request_id: Annotated[str, Bounds(0, 128)]
    """Empty when the client's message was too broken to name one."""
    code: Name
    reason: Text
    field: Name | None = None


@message(tag=51)
class ControlReply:
    """core -> client: the answer to a Control."""

    core_id: U64
    control_id: U64
    error: Text
    """Empty when it went well."""
    values: Scalars


@part
class TimelineLane:
    """What one thread did: the core's, or a rank's main thread. Times are on the core's clock."""

    rank: U32 | None
    """None for the core."""
    host: Name
    error: Text
    """Why there are no spans; empty when there are."""
    clock_error_ns: U64
    """How wrong the times may be, beside the core's: half of what the question was under way; 0 on the core's host."""
    spans: FewSpans


@message(tag=52)
class TimelineReply:
    """core -> client: the answer to a Control "timeline", whichever ranks answered in time."""

    core_id: U64
    control_id: U64
    now_ns: Nanoseconds
    """When the core was asked, on its clock: the end of the window."""
    seconds: float
    lanes: tuple[TimelineLane, ...]
    """The core, then every rank in order."""
