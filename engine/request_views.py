"""Who has what open, as the core tells it to whoever asks; see ipc/views.py."""

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from engine.choices import OpenRequests
from engine.grammar_compiler import GrammarCompiler
from engine.request import ClientId, Request, RequestStatus
from ipc.messages import Control
from ipc.views import MAX_VIEWED, RequestsReply, RequestState

MAX_NAMES = 4096
"""Clients whose names are remembered; nobody says goodbye, so the oldest are forgotten."""

MAX_AGE_MS = (1 << 31) - 1


class RequestViews:
    """Knows the names under which clients attached, and where requests may stand."""

    def __init__(
        self, requests: OpenRequests, grammars: GrammarCompiler, *, core_id: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = requests
        self._grammars = grammars
        self._core_id = core_id
        self._clock = clock
        self._names: OrderedDict[ClientId, str] = OrderedDict()

    def attached(self, client: ClientId, name: str) -> None:
        """Remember what a client calls itself."""
        self._names[client] = name
        self._names.move_to_end(client)
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def answer(self, question: Control) -> RequestsReply:
        """The oldest requests that are open. O(MAX_VIEWED)."""
        now = self._clock()
        told = list(islice(self._requests.oldest_first(), MAX_VIEWED))
        clients: dict[ClientId, int] = {}
        for request in told:
            clients.setdefault(request.client, len(clients))
        return RequestsReply(
            core_id=self._core_id,
            control_id=question.control_id,
            num_open=len(self._requests),
            clients=tuple(map(self._shown, clients)),
            request_ids=tuple(request.request_id for request in told),
            client_indices=[clients[request.client] for request in told],
            indices=[request.index for request in told],
            states=[int(self._state(request)) for request in told],
            ages_ms=[min(MAX_AGE_MS, max(0, int((now - request.arrival_time) * 1e3))) for request in told],
            num_prompt_tokens=[request.num_prompt_tokens for request in told],
            num_cached_tokens=[request.num_cached_tokens for request in told],
            num_output_tokens=[len(request.output_token_ids) for request in told],
            num_preemptions=[request.num_preemptions for request in told],
        )

    def _shown(self, client: ClientId) -> str:
        name = self._names.get(client, "")
        return f"{name or 'client'} {client.listener}.{client.identity[-4:].hex()}"[-256:]

    def _state(self, request: Request) -> RequestState:
        if self._requests.is_held(request):
            return RequestState.HELD
        if self._grammars.is_pending(request):
            return RequestState.COMPILING
        if request.status is RequestStatus.WAITING:
            return RequestState.PREEMPTED if request.num_preemptions else RequestState.WAITING
        is_prompt = request.num_computed_tokens < request.num_prompt_tokens
        return RequestState.PROMPT if is_prompt else RequestState.ANSWER
