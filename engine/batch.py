"""Many prompts at once, for both clients: enough of them under way to fill the engine, and results in the order of the prompts."""

import asyncio
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from engine.outputs import Output
from engine.progress import BatchProgress, ProgressBar, ProgressHook
from ipc.errors import PeerLost, RequestError
from ipc.params import SamplingParams

MAX_OPEN = 1024
"""Choices that a batch has open unless it is told otherwise; engines refuse what is far beyond their own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one prompt of a batch."""

    index: int
    """Of the prompt."""

    outputs: tuple[Output, ...]
    """The newest output of each choice that had one, in order; the last one unless there is an error."""

    error: RequestError | PeerLost | None = None
    """Why the request ended; the others of the batch go on."""

    @property
    def output(self) -> Output:
        """The last output of the first choice. Raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        """Its text. Raises the error if there is one."""
        return self.output.text


class Stream(Protocol):
    """A ``Generation``."""

    @property
    def is_over(self) -> bool: ...

    def __next__(self) -> Output: ...

    def close(self) -> None: ...


class AsyncStream(Protocol):
    """An ``AsyncGeneration``."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def __anext__(self) -> Output: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: Any) -> None: ...


Tell = Callable[[], None]


class Tally:
    """Results as they come, and the hook that hears of each."""

    def __init__(self, num_total: int, hook: ProgressHook | None) -> None:
        self._hook = hook
        self._outputs: list[dict[int, Output]] = [{} for _ in range(num_total)]
        self._errors: dict[int, RequestError | PeerLost] = {}
        self._num_done = 0
        self._num_tokens = 0

    def take(self, index: int, output: Output) -> None:
        self._outputs[index][output.index] = output
        self._num_tokens += output.num_new_tokens
        self._tell()

    def finish(self, index: int, error: RequestError | PeerLost | None = None) -> None:
        self._num_done += 1
        if error is not None:
            self._errors[index] = error
        self._tell()

    def results(self) -> list[Result]:
        """In the order of the prompts."""
        return [
            Result(index=index, outputs=tuple(outputs[key] for key in sorted(outputs)), error=self._errors.get(index))
            for index, outputs in enumerate(self._outputs)
        ]

    def _tell(self) -> None:
        if self._hook is not None:
            self._hook(BatchProgress(
                num_total=len(self._outputs), num_done=self._num_done, num_failed=len(self._errors),
                num_tokens=self._num_tokens,
            ))  # fmt: skip


def run_batch(
    num_total: int, send: Callable[[int, Tell], Stream], max_open: int, progress: bool | ProgressHook
) -> list[Result]:
    """Send each request when there is room, and take outputs of whichever has one.

    ``send`` gets an index, and what to call for everything that its stream has to be read.
    """
    has_news: queue.SimpleQueue[int] = queue.SimpleQueue()
    under_way: dict[int, Stream] = {}
    waiting = iter(range(num_total))
    with _hook_of(progress, num_total) as hook:
        tally = Tally(num_total, hook)
        try:
            while True:
                while len(under_way) < max_open and (index := next(waiting, None)) is not None:
                    try:
                        under_way[index] = send(index, partial(has_news.put, index))
                    except RequestError as error:
                        tally.finish(index, error)
                    except PeerLost as error:
                        # Nobody is there, and the wait for that is over: not once more for each of the others.
                        for lost in (index, *waiting):
                            tally.finish(lost, error)
                if not under_way:
                    return tally.results()
                index = has_news.get()
                if index in under_way and _take(tally, index, under_way[index]):
                    del under_way[index]
        finally:
            for stream in under_way.values():
                stream.close()


def _take(tally: Tally, index: int, stream: Stream) -> bool:
    """Read one output; true when the request is over."""
    try:
        tally.take(index, next(stream))
    except (RequestError, PeerLost) as error:
        tally.finish(index, error)
        return True
    except StopIteration:
        tally.finish(index)
        return True
    if stream.is_over:
        tally.finish(index)
    return stream.is_over


async def run_batch_async(
    num_total: int,
    attach: Callable[[], Awaitable[object]],
    send: Callable[[int], AsyncStream],
    max_open: int,
    progress: bool | ProgressHook,
) -> list[Result]:
    """The same on an event loop. Cancelling it ends what is open. ``attach`` finds the engine again, if it is lost."""
    room = asyncio.Semaphore(max_open)
    gone: list[PeerLost] = []
    with _hook_of(progress, num_total) as hook:
        tally = Tally(num_total, hook)

        async def ask(index: int) -> None:
            if not gone:
                try:
                    await attach()
                except PeerLost as error:
                    gone.append(error)
            if gone:
                tally.finish(index, gone[0])
                return
            try:
                async with send(index) as stream:
                    async for output in stream:
                        tally.take(index, output)
            except (RequestError, PeerLost) as error:
                tally.finish(index, error)
            else:
                tally.finish(index)

        async def ask_in_turn(index: int) -> None:
            async with room:
                await ask(index)

        async with asyncio.TaskGroup() as group:
            for index in range(num_total):
                group.create_task(ask_in_turn(index))
    return tally.results()


def params_of_batch(params: SamplingParams | Sequence[SamplingParams] | None, num_total: int) -> list[SamplingParams]:
    """One for each prompt. Raises RequestError for a list of another length, or with something else in it."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_total
    if not isinstance(params, list | tuple) or any(not isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            f"params must be SamplingParams or a list with one for each prompt, got {params!r:.80}", field="params"
        )
    if len(params) != num_total:
        raise RequestError(f"params has {len(params)} entries for {num_total} prompts", field="params")
    return list(params)


def check_list(field: str, value: Any, what: str) -> list[Any]:
    """A list. Raises RequestError, above all for a text, which is a sequence of prompts only by accident."""
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise RequestError(f"{field}={value!r:.80} must be a list of {what}", field=field)
    return list(value)


def room_for(max_open: int | None, max_num_seqs: int, params: Sequence[SamplingParams]) -> int:
    """Requests to have open at a time: twice what the engine runs, so that it never waits for the next one.

    Raises RequestError for a number that is none.
    """
    if max_open is None:
        num_choices = max((one.n for one in params), default=1)
        return max(1, min(MAX_OPEN, 2 * max_num_seqs) // num_choices)
    if type(max_open) is not int or max_open < 1:
        raise RequestError(f"max_open={max_open!r:.80} must be an integer of at least 1", field="max_open")
    return max_open


def _hook_of(progress: bool | ProgressHook, num_total: int) -> AbstractContextManager[ProgressHook | None]:
    if progress is True:
        return ProgressBar(num_total)
    if progress is False or progress is None:
        return nullcontext(None)
    if not callable(progress):
        raise RequestError(f"progress={progress!r:.80} must be true, false or a function", field="progress")
    return nullcontext(progress)
