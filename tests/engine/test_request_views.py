"""Is everybody's open request told as it stands, bounded, and without a word of its text?"""

from dataclasses import dataclass, field

from engine.choices import OpenRequests
from engine.request import ClientId, Request, RequestStatus
from engine.request_views import MAX_NAMES, RequestViews
from ipc.codec import encode
from ipc.messages import Control
from ipc.params import SamplingParams
from ipc.views import MAX_VIEWED, RequestsReply, RequestState

ASKED = Control(control_id=9, op="requests")
A, B = ClientId(0, b"\x00aaaa"), ClientId(1, b"\x00bbbb")


@dataclass
class Grammars:
    """Those that are being compiled."""

    pending: set[int] = field(default_factory=set)

    def is_pending(self, request: Request) -> bool:
        return request.internal_id in self.pending


@dataclass
class Core:
    """As much of one as matters here."""

    requests: OpenRequests = field(default_factory=OpenRequests)
    grammars: Grammars = field(default_factory=Grammars)
    now: float = 100.0
    num: int = 0

    def __post_init__(self) -> None:
        self.views = RequestViews(self.requests, self.grammars, core_id=3, clock=lambda: self.now)  # type: ignore[arg-type]

    def add(self, client: ClientId, request_id: str, num_choices: int = 1, arrival: float = 90.0) -> list[Request]:
        made = []
        for index in range(num_choices):
            self.num += 1
            made.append(Request(
                request_id=request_id, internal_id=self.num, client=client, prompt_token_ids=[5, 6, 7], params=SamplingParams(seed=1),
                index=index, arrival_time=arrival,
            ))  # fmt: skip
        self.requests.add(made)
        return made

    def answer(self) -> RequestsReply:
        return self.views.answer(ASKED)


def test_requests_are_told_oldest_first_with_who_asked() -> None:
    core = Core()
    core.views.attached(A, "brigade-python")
    core.add(A, "r", 2)
    core.add(B, "s", arrival=99.5)
    core.add(A, "t", arrival=99.9)
    reply = core.answer()
    assert (reply.core_id, reply.control_id, reply.num_open) == (3, 9, 4)
    assert reply.clients == ("brigade-python 0.61616161", "client 1.62626262")
    assert reply.request_ids == ("r", "r", "s", "t") and reply.indices == [0, 1, 0, 0] and reply.client_indices == [0, 0, 1, 0]
    assert reply.ages_ms == [10_000, 10_000, 500, 99] and reply.num_prompt_tokens == [3] * 4
    assert core.views.answer(ASKED).num_output_tokens == [0] * 4


def test_every_state_has_its_number() -> None:
    core = Core()
    waiting, preempted, prompt, answer, compiling, ahead, held = (
        *(core.add(A, name)[0] for name in ("w", "p", "q", "a", "c")), *core.add(A, "two", 2),
    )  # fmt: skip
    preempted.num_preemptions = 2
    for request in (prompt, answer):
        request.status = RequestStatus.RUNNING
    prompt.num_computed_tokens, answer.num_computed_tokens = 2, 3
    answer.output_token_ids.append(8)
    core.grammars.pending.add(compiling.internal_id)
    core.requests.hold([ahead, held], None, waits_for_blocks=True)
    reply = core.answer()
    assert [RequestState(number).name for number in reply.states] == [
        "WAITING", "PREEMPTED", "PROMPT", "ANSWER", "COMPILING", "WAITING", "HELD"
    ]  # fmt: skip
    assert reply.num_preemptions[1] == 2 and reply.num_output_tokens[3] == 1
    assert waiting.num_preemptions == 0


def test_an_answer_is_bounded_and_says_how_many_there_are() -> None:
    core = Core()
    for number in range(MAX_VIEWED + 10):
        core.add(A, "x" * 120 + str(number))
    reply = core.answer()
    assert (len(reply.request_ids), reply.num_open) == (MAX_VIEWED, MAX_VIEWED + 10)
    assert sum(len(bytes(frame)) for frame in encode(reply)) < 100_000


def test_names_are_forgotten_when_too_many_clients_came() -> None:
    core = Core()
    core.views.attached(A, "first")
    for number in range(MAX_NAMES):
        core.views.attached(ClientId(0, number.to_bytes(5, "big")), "other")
    core.add(A, "r")
    core.add(ClientId(0, bytes(5)), "s")
    assert core.answer().clients == ("client 0.61616161", "other 0.00000000")


def test_an_age_beyond_the_column_is_its_largest_value() -> None:
    core = Core(now=1e9)
    core.add(A, "r")
    assert core.answer().ages_ms == [(1 << 31) - 1]
