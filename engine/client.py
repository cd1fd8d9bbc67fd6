"""A blocking client: text or token ids in, text and token ids out."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from engine.batch import Result, Tell, check_list, params_of_batch, room_for, run_batch
from engine.outputs import Answers, Output
from engine.progress import ProgressHook
from engine.prompts import Prepare, Prepared, PrepareItem, TextSide
from engine.resumption import Losses, TimeLeft, told_to
from engine.text.tokenizer import Tokenizer
from ipc.client import TokenClient, TokenStream
from ipc.conversation import ATTACH_TIMEOUT_S, CONTROL_TIMEOUT_S, Scalar, Told, check_request_id, check_timeout
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import PeerLost
from ipc.messages import ModelInfo, TimelineReply
from ipc.params import SamplingParams
from ipc.security import KeySource
from ipc.views import RequestsReply


class _Attachment(NamedTuple):
    tokens: TokenClient
    text: TextSide


class Client:
    """One attachment to a running engine; safe to use from many threads::

        with Client() as client:
            for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.delta, end="")

    When the engine goes away, everything that is open raises PeerLost, and so does every later call. With ``reconnect_s``
    the client attaches again instead, to whatever engine is at ``addr`` by then, and waits so many seconds for it: requests
    that are open are sent once more with the tokens that they have, and their outputs go on where they were.

    An engine that was started with ``--server-key`` is reached with ``server_key``, its public key or the file of it, and
    ``client_key``, the file of a secret key that it lets in. Where they are not given, BRIGADE_SERVER_KEY and
    BRIGADE_CLIENT_KEY say them.

    Raises:
        PeerLost: no engine answered at ``addr`` within ``timeout_s``.
        ConfigError: its tokenizer is not one that this version can read, or a key can't be used.
        RequestError: ``addr`` is not an address, or one of the two not a time to wait.
    """

    def __init__(
        self,
        addr: str = DEFAULT_LISTEN,
        *,
        timeout_s: float = ATTACH_TIMEOUT_S,
        reconnect_s: float | None = None,
        server_key: KeySource | None = None,
        client_key: KeySource | None = None,
    ) -> None:
        self._addr = addr
        self._connect = partial(TokenClient, addr, server_key=server_key, client_key=client_key)
        self._reconnect_s = None if reconnect_s is None else check_timeout(reconnect_s, "reconnect_s")
        self._reconnecting = threading.Lock()
        self._is_closed = False
        self._attachment = _attach(self._connect, timeout_s)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def model(self) -> ModelInfo:
        """What the engine serves: name, limits, and the model's text files."""
        return self._attachment.tokens.model

    @property
    def is_lost(self) -> bool:
        """The engine is gone, or this client was closed."""
        return self._attachment.tokens.is_lost

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self._attachment.text.tokenizer

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "Generation":
        """Send a request now and iterate over its outputs; the last one has a finish reason.

        With ``params.n`` above 1 outputs of all choices come as they are made; see ``Output.index``.
        ``priority`` orders requests under ``--scheduling-policy priority``, the lowest number first. After ``timeout_s``
        seconds a request ends with finish reason "timeout" and the tokens that it has.

        Raises:
            RequestError: the prompt can't be used. The engine's own refusals come while iterating.
            PeerLost: the engine is gone.
        """
        return self._generation(lambda text: text.prepare(prompt, params), request_id, priority, timeout_s)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        **template_variables: Any,
    ) -> "Generation":
        """The same for messages, each a map with role and content, through the model's chat template.

        ``template_variables`` go to the template (``tools``, ``add_generation_prompt=False`` and what else it knows).
        """
        return self._generation(
            lambda text: text.prepare_chat(messages, params, template_variables), request_id, priority, timeout_s
        )

    def generate_batch(
        self,
        prompts: Iterable[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressHook = False,
        max_open: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[Result]:
        """Answers to all prompts, in their order, when the last one is there.

        A request that fails leaves the others their answers; see ``Result``. Leaving early, as by Ctrl-C, ends what is open.

        Args:
            params: for all prompts, or a list with one for each.
            progress: true draws a bar while standard error is a terminal; a function is called for every output.
            max_open: requests that are open at a time; by default twice as many as the engine runs.
            timeout_s: of each request, from when it is sent.

        Raises:
            RequestError: an argument can't be used; nothing was sent.
        """
        asked = check_list("prompts", prompts, "prompts, each a text or a list of token ids")
        return self._batch(asked, params, TextSide.prepare, progress, max_open, priority, timeout_s)

    def chat_batch(
        self,
        conversations: Iterable[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | ProgressHook = False,
        max_open: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        **template_variables: Any,
    ) -> list[Result]:
        """The same for conversations, each a list of messages as ``chat`` takes them."""
        asked = check_list("conversations", conversations, "lists of messages")

        def prepare(text: TextSide, messages: Sequence[Mapping[str, Any]], rules: SamplingParams) -> Prepared:
            return text.prepare_chat(messages, rules, template_variables)

        return self._batch(asked, params, prepare, progress, max_open, priority, timeout_s)

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Prepared:
        """The slow half of ``generate``, in proportion to the prompt: checks and tokens. ``submit`` is the other."""
        return self._attachment.text.prepare(prompt, params)

    def prepare_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **template_variables: Any
    ) -> Prepared:
        """The same of ``chat``."""
        return self._attachment.text.prepare_chat(messages, params, template_variables)

    def submit(
        self,
        prepared: Prepared,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> "Generation":
        """Send what was prepared now, and iterate over its outputs as those of ``generate``."""
        return self._generation(lambda text: prepared, request_id, priority, timeout_s)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that ``generate`` would send for this prompt."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its choice ``index``; each choice that ends gets a last output. Harmless for ids that are
        unknown or over.
        """
        self._attached().tokens.abort(request_id, index)

    def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name."""
        return self._attached().tokens.stats(timeout_s)

    def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises RequestError or PeerLost when they can't."""
        return self._attached().tokens.health(timeout_s)

    def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        self._attached().tokens.reset_prefix_cache(timeout_s)

    def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds (see ipc/spans.py). Raises RequestError or PeerLost.

        A rank that does not answer in time has a lane with an error instead of spans.
        """
        return self._attached().tokens.timeline(seconds, timeout_s)

    def requests(self, timeout_s: float = CONTROL_TIMEOUT_S) -> RequestsReply:
        """Which requests of all clients are open, and how far each is (see ipc/views.py); nothing of their text."""
        return self._attached().tokens.requests(timeout_s)

    def close(self) -> None:
        """End all open requests and leave. Idempotent."""
        self._is_closed = True
        self._attachment.tokens.close()

    def _attached(self) -> _Attachment:
        """What is there; a new one if that is lost and may be replaced. Raises PeerLost when nobody answers in time."""
        attachment = self._attachment
        if self._reconnect_s is None or not attachment.tokens.is_lost:
            return attachment
        with self._reconnecting:
            if self._attachment.tokens.is_lost and not self._is_closed:
                self._attachment.tokens.close()
                self._attachment = _attach(self._connect, self._reconnect_s, self._attachment.text)
            if self._is_closed:
                self._attachment.tokens.close()
            return self._attachment

    def _batch(
        self, asked: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None, prepare: PrepareItem,
        progress: bool | ProgressHook, max_open: int | None, priority: int, timeout_s: float | None,
    ) -> list[Result]:  # fmt: skip
        rules = params_of_batch(params, len(asked))

        def send(index: int, tell: Tell) -> Generation:
            return self._generation(lambda text: prepare(text, asked[index], rules[index]), None, priority, timeout_s, tell)

        return run_batch(len(asked), send, room_for(max_open, self.model.max_num_seqs, rules), progress)

    def _generation(
        self, prepare: Prepare, request_id: str | None, priority: int, timeout_s: float | None, on_news: Tell | None = None
    ) -> "Generation":
        tokens, text = self._attached()
        prepared = prepare(text)
        answers = text.answers(check_request_id(request_id), prepared)
        time_left = TimeLeft(timeout_s)

        def send(tokens: TokenClient, timeout_s: float | None, told: Told | None = None) -> TokenStream:
            return tokens.generate(
                prepared.token_ids, prepared.params, answers.request_id, priority=priority,
                timeout_s=timeout_s, on_news=on_news, told=told,
            )  # fmt: skip

        def resend() -> TokenStream:
            tokens, found = self._attached()
            return send(tokens, time_left(), told_to(answers, text, found.model, self._addr))

        return Generation(send(tokens, timeout_s), answers, None if self._reconnect_s is None else resend)


def _attach(connect: "partial[TokenClient]", timeout_s: float, known: TextSide | None = None) -> _Attachment:
    """``known`` is taken over if it is of the same model: making one takes long."""
    tokens = connect(timeout_s=timeout_s)
    try:
        return _Attachment(tokens, known if known is not None and known.is_of(tokens.model) else TextSide(tokens.model))
    except BaseException:
        tokens.close()
        raise


class Generation:
    """The outputs of one request, in order; with ``n`` choices those of all, told apart by ``index``.

    It ends when every choice has had its output with a finish reason. Leaving early, by ``close`` or by dropping it, aborts
    the request.
    """

    def __init__(self, stream: TokenStream, answers: Answers, resend: Callable[[], TokenStream] | None) -> None:
        """``resend``, if any, finds the engine again and sends what is still open of the request."""
        self.request_id = stream.request_id
        self._stream = stream
        self._answers = answers
        self._losses = Losses(resend)
        self._finding = threading.Lock()
        self._is_closed = False

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Output:
        """Raises RequestError when the engine ends the request with an error, PeerLost when the engine is gone."""
        while not self._answers.are_over:
            stream = self._stream
            try:
                message = self._losses.read(stream.__next__)
            except PeerLost as error:
                self._replace(stream, error)
                continue
            output = self._answers.take(message, stream)
            if output is not None:
                return output
        raise StopIteration

    @property
    def is_over(self) -> bool:
        """Every choice has had its last output."""
        return self._answers.are_over

    def poll(self) -> Output | None:
        """The next output if it is there already, without waiting; None also when there will be none, or when ``next`` would
        have to find the engine again. Raises as ``next``.
        """
        while not self._answers.are_over and (message := self._losses.poll(self._stream.poll)) is not None:
            output = self._answers.take(message, self._stream)
            if output is not None:
                return output
        return None

    def close(self) -> None:
        """Stop reading; the request ends at the engine if it had not. Idempotent."""
        self._is_closed = True
        self._stream.close()

    def _replace(self, lost: TokenStream, error: PeerLost) -> None:
        with self._finding:
            if self._stream is lost:
                self._stream = self._losses.way_on(error)()
                if self._is_closed:
                    self._stream.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
