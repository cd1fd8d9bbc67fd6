"""The streams of one HTTP request, which may have several prompts, read as one."""

import asyncio
from collections.abc import Sequence

from engine.aclient import AsyncGeneration
from engine.outputs import Output
from ipc.errors import EngineError

Batch = list[tuple[int, Output]]
"""Outputs, each with the number of its prompt, in the order in which each choice made them."""


class Generations:
    """Ends when every stream has; the first error ends all of them. To be closed whatever happens."""

    def __init__(self, streams: Sequence[AsyncGeneration]) -> None:
        self._streams = streams
        self._inbox: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()
        self._num_open = len(streams)
        self._readers: list[asyncio.Task[None]] = []
        self._error: Exception | None = None
        """Came behind outputs that were delivered first."""

    async def next(self) -> Batch:
        """At least one output and all others that are there already; empty when all is over.

        Raises:
            RequestError, PeerLost: what ended one of the streams.
        """
        if self._error is not None:
            raise self._error
        if len(self._streams) == 1:
            return await self._next_of_one(self._streams[0])
        if not self._readers:
            self._readers = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(self._streams)]
        batch: Batch = []
        while self._num_open and (not batch or not self._inbox.empty()):
            item = await self._inbox.get()
            if isinstance(item, Exception):
                if not batch:
                    raise item
                self._error = item
                break
            if item is None:
                self._num_open -= 1
            else:
                batch.append(item)
        return batch

    async def aclose(self) -> None:
        """Whatever still runs is ended at the engine. Idempotent."""
        for reader in self._readers:
            reader.cancel()
        for stream in self._streams:
            await stream.aclose()

    async def _next_of_one(self, stream: AsyncGeneration) -> Batch:
        try:
            batch = [(0, await anext(stream))]
        except StopAsyncIteration:
            return []
        try:
            while (output := stream.poll()) is not None:
                batch.append((0, output))
        except EngineError as error:
            self._error = error
        return batch

    async def _read(self, index: int, stream: AsyncGeneration) -> None:
        try:
            async for output in stream:
                self._inbox.put_nowait((index, output))
            self._inbox.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by whoever reads
            self._inbox.put_nowait(error)
