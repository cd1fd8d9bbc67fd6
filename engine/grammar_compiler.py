"""How do grammars get compiled while the core's loop goes on?

A thread of its own compiles one after another, from the first request that asks for one on; llguidance lets the loop run
meanwhile. The loop hands requests over and takes them back, ready or refused.
"""

import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from engine.config import ModelFiles
from engine.request import AnswerGrammar, Request
from ipc.errors import RequestError
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 30.0
"""From a request's arrival to its grammar. The first one also waits for the model's tokenizer."""

MAX_PENDING_BYTES = 4 << 20
"""Of all forms that wait to be compiled; a core that waits for nothing takes any."""

STACK_BYTES = 256 << 20
"""Of the compiling thread, touched as far as it is used: the compiler calls itself for each rule that a rule leads to, and a stack
that overflows ends the process."""

MAX_CACHED = 64
"""Compiled grammars that are kept for the next request with the same form: the same tool is called again and again."""


class Prototype(Protocol):
    """A compiled grammar, of which each request gets a copy."""

    def copy(self, params: SamplingParams) -> AnswerGrammar:
        """For one request."""


class Compiler(Protocol):
    """What turns a form into a grammar."""

    def compile(self, structured: StructuredOutput) -> Prototype:
        """Raises RequestError for what can't be compiled."""


def load_vocabulary(files: ModelFiles, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Compiler:
    """The compiler for a model. Raises RequestError when llguidance is missing, or what it needs of the model."""
    try:
        from engine.grammar import Vocabulary
    except ImportError:
        raise RequestError(
            "structured output needs llguidance where the engine runs: pip install -e '.[structured]' in Brigade's clone",
            field="structured",
        ) from None
    return Vocabulary(files, vocab_size, eos_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    request: Request
    structured: StructuredOutput
    params: SamplingParams
    output_token_ids: list[int]
    deadline: float


class GrammarCompiler:
    """Methods are for the loop's thread. ``fd`` is readable when ``take_done`` has something."""

    def __init__(self, load: Callable[[], Compiler], *, clock: Callable[[], float] = time.monotonic) -> None:
        """``load`` is called in the compiling thread, at the first grammar; it may raise RequestError."""
        self._load = load
        self._clock = clock
        self._pending: dict[int, _Job] = {}
        """By internal id, in the order of arrival, so of deadlines."""
        self._pending_bytes = 0
        self.num_pending_tokens = 0
        """Of all requests that wait here."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[_Job, AnswerGrammar | RequestError]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, request: Request, structured: StructuredOutput) -> None:
        """Begin; the request comes back from ``take_done`` unless it is cancelled.

        Raises:
            RequestError: too much waits already.
        """
        size = structured.size_bytes
        if self._pending and self._pending_bytes + size > MAX_PENDING_BYTES:
            raise RequestError(
                f"grammars of {self._pending_bytes} bytes wait to be compiled, {MAX_PENDING_BYTES} may; try again later",
                code="overloaded", field="structured",
            )  # fmt: skip
        job = _Job(
            request=request, structured=structured, params=request.params,
            output_token_ids=list(request.output_token_ids), deadline=self._clock() + TIME_LIMIT_S,
        )  # fmt: skip
        self._pending[request.internal_id] = job
        self._pending_bytes += size
        self.num_pending_tokens += request.num_tokens
        self._jobs.put(job)
        if self._thread is None:
            # Not waited for at the end: it holds nothing that outlives the process.
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            usual = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(usual)

    def is_pending(self, request: Request) -> bool:
        return request.internal_id in self._pending

    def cancel(self, request: Request) -> bool:
        """Forget a request; false if it isn't here."""
        job = self._pending.pop(request.internal_id, None)
        if job is None:
            return False
        self._pending_bytes -= job.structured.size_bytes
        self.num_pending_tokens -= request.num_tokens
        return True

    def deadline(self) -> float | None:
        """When the time of the next request is over, on the clock."""
        return next((job.deadline for job in self._pending.values()), None)

    def take_done(self) -> list[tuple[Request, AnswerGrammar | RequestError]]:
        """Requests whose grammars are ready, refused, or too late; each once."""
        taken: list[tuple[Request, AnswerGrammar | RequestError]] = []
        if self._thread is None:
            return taken
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while not self._done.empty():
            job, outcome = self._done.get()
            if self.cancel(job.request):
                taken.append((job.request, outcome))
        now = self._clock()
        for job in list(self._pending.values()):
            if job.deadline > now:
                break
            self.cancel(job.request)
            field = f"structured.{job.structured.kind}"
            text = f"{field} was not compiled within {TIME_LIMIT_S:g} s; simplify it, or try again when the engine has less to do"
            taken.append((job.request, RequestError(text, field=field)))
        return taken

    # ------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        compiler: Compiler | None = None
        cached: OrderedDict[StructuredOutput, Prototype] = OrderedDict()
        while True:
            job = self._jobs.get()
            if job.request.internal_id not in self._pending:
                continue
            outcome: AnswerGrammar | RequestError
            try:
                if compiler is None:
                    compiler = self._load()
                outcome = _prepare(job, compiler, cached)
            except RequestError as error:
                outcome = error
            except BaseException as error:  # noqa: BLE001 a panic in the library's Rust code is no Exception
                logger.exception("a grammar could not be compiled")
                outcome = RequestError(
                    f"compiling it failed ({type(error).__name__})", code="internal", field="structured"
                )
            self._done.put((job, outcome))
            os.eventfd_write(self.fd, 1)


def _prepare(job: _Job, compiler: Compiler, cached: OrderedDict[StructuredOutput, Prototype]) -> AnswerGrammar:
    prototype = cached.pop(job.structured, None) or compiler.compile(job.structured)
    cached[job.structured] = prototype
    if len(cached) > MAX_CACHED:
        cached.popitem(last=False)
    grammar = prototype.copy(job.params)
    for token_id in job.output_token_ids:
        if grammar.is_complete:
            break
        _accept_again(grammar, token_id)
    return grammar


def _accept_again(grammar: AnswerGrammar, token_id: int) -> None:
    try:
        grammar.accept(token_id)
    except RequestError as error:
        raise RequestError(f"output_token_ids does not fit: {error.reason}", field="output_token_ids") from None
