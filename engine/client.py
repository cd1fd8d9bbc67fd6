"""A blocking client: text or token ids in, text and token ids out."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from engine.outputs import Answers, Output
from engine.prompts import Prepared, TextSide
from engine.text.tokenizer import Tokenizer
from ipc.client import TokenClient, TokenStream
from ipc.conversation import ATTACH_TIMEOUT_S, CONTROL_TIMEOUT_S, Scalar, check_request_id
from ipc.endpoints import DEFAULT_LISTEN
from ipc.messages import ModelInfo, TimelineReply
from ipc.params import SamplingParams


class Client:
    """One attachment to a running engine; safe to use from many threads::

        with Client() as client:
            for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
                print(output.delta, end="")

    Raises:
        PeerLost: no engine answered at ``addr`` within ``timeout_s``.
        ConfigError: its tokenizer is not one that this version can read.
        RequestError: ``addr`` is not an address, or ``timeout_s`` not a time to wait.
    """

    def __init__(self, addr: str = DEFAULT_LISTEN, *, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        self._tokens = TokenClient(addr, timeout_s=timeout_s)
        try:
            self._text = TextSide(self._tokens.model)
        except BaseException:
            self._tokens.close()
            raise

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def model(self) -> ModelInfo:
        """What the engine serves: name, limits, and the model's text files."""
        return self._tokens.model

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError when it has none."""
        return self._text.tokenizer

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
        return self._send(self._text.prepare(prompt, params), request_id, priority, timeout_s)

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
        return self._send(self._text.prepare_chat(messages, params, template_variables), request_id, priority, timeout_s)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids that ``generate`` would send for this prompt."""
        return self._text.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens."""
        return self._text.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or only its choice ``index``; each choice that ends gets a last output. Harmless for ids that are
        unknown or over.
        """
        self._tokens.abort(request_id, index)

    def stats(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Counters of the engine, by name."""
        return self._tokens.stats(timeout_s)

    def health(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Scalar]:
        """Can tokens flow? Raises RequestError or PeerLost when they can't."""
        return self._tokens.health(timeout_s)

    def reset_prefix_cache(self, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        """Forget the KV blocks that finished requests left. Requests that run keep theirs, and share them no more."""
        self._tokens.reset_prefix_cache(timeout_s)

    def timeline(self, seconds: float = 1.0, timeout_s: float = CONTROL_TIMEOUT_S) -> TimelineReply:
        """What the core and every rank did in the last seconds (see ipc/spans.py). Raises RequestError or PeerLost.

        A rank that does not answer in time has a lane with an error instead of spans.
        """
        return self._tokens.timeline(seconds, timeout_s)

    def close(self) -> None:
        """End all open requests and leave. Idempotent."""
        self._tokens.close()

    def _send(self, prepared: Prepared, request_id: str | None, priority: int, timeout_s: float | None) -> "Generation":
        answers = self._text.answers(check_request_id(request_id), prepared)
        stream = self._tokens.generate(
            prepared.token_ids, prepared.params, answers.request_id, priority=priority, timeout_s=timeout_s
        )
        return Generation(stream, answers)


class Generation:
    """The outputs of one request, in order; with ``n`` choices those of all, told apart by ``index``.

    It ends when every choice has had its output with a finish reason. Leaving early, by ``close`` or by dropping it, aborts
    the request.
    """

    def __init__(self, stream: TokenStream, answers: Answers) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._answers = answers

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Output:
        """Raises RequestError when the engine ends the request with an error, PeerLost when the engine is gone."""
        while not self._answers.are_over:
            output = self._answers.take(next(self._stream), self._stream)
            if output is not None:
                return output
        raise StopIteration

    def close(self) -> None:
        """Stop reading; the request ends at the engine if it had not. Idempotent."""
        self._stream.close()

    def __enter__(self) -> "Generation":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
