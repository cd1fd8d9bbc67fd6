"""Does a stream end for everyone who reads it: for cancelled tasks at once, for threads and tasks that share it together?"""

import asyncio
import queue
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from ipc.aclient import AsyncTokenClient
from ipc.client import TokenClient
from ipc.errors import PeerLost, RequestError
from ipc.messages import AbortRequest, AddRequest, RequestOutput
from tests.fake_core import DEADLINE_S, FakeCore


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 3 * DEADLINE_S))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("waits_for", ["output", "body", "deadline"])
def test_a_cancelled_reader_aborts_though_its_error_is_kept(waits_for: str) -> None:
    """The error's traceback holds the frame that holds the stream, so nothing is dropped."""

    def first_token(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, [3])

    async def go() -> None:
        with FakeCore(reply=first_token) as core:
            async with AsyncTokenClient(core.address) as client:
                stream, has_begun = client.generate([1], request_id="r"), asyncio.Event()

                async def read() -> None:
                    async for _ in stream:
                        has_begun.set()
                        if waits_for == "body":
                            await asyncio.Event().wait()
                        if waits_for == "deadline":
                            await asyncio.wait_for(anext(stream), 0.05)

                task = asyncio.create_task(read())
                await has_begun.wait()
                if waits_for != "deadline":
                    task.cancel()
                kept = await asyncio.gather(task, return_exceptions=True)
                _, abort = await asyncio.to_thread(core.next, AbortRequest)
                assert abort.request_id == "r"
                assert isinstance(kept[0], (asyncio.CancelledError, TimeoutError))
                assert [output async for output in stream] == []

    run(go())


def test_a_task_that_was_cancelled_elsewhere_does_not_end_a_stream_that_another_one_reads() -> None:
    async def go() -> None:
        with FakeCore() as core:
            async with AsyncTokenClient(core.address) as client:
                stream, has_read = client.generate([1], request_id="r"), asyncio.Event()
                peer, _ = await asyncio.to_thread(core.next, AddRequest)

                async def read_one_and_wait() -> None:
                    await anext(stream)
                    has_read.set()
                    await asyncio.Event().wait()

                task = asyncio.create_task(read_one_and_wait())
                core.output(peer, "r", [3])
                await has_read.wait()
                core.output(peer, "r", [4])
                assert (await anext(stream)).new_token_ids == [4]
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                core.output(peer, "r", [5], finish_reason="length")
                assert tokens_of([output async for output in stream]) == [5]

    run(go())


@pytest.mark.parametrize("end", ["output", "error", "close", "lost"])
def test_no_reader_of_a_shared_stream_waits_for_ever(end: str) -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        stream = client.generate([1], request_id="r")
        peer, _ = core.next(AddRequest)
        endings: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            try:
                endings.put(str(tokens_of(list(stream))))
            except (RequestError, PeerLost) as error:
                endings.put(type(error).__name__)

        threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        if end == "output":
            core.output(peer, "r", [7], finish_reason="length")
        elif end == "error":
            core.fail(peer, "r", "internal", "broken")
        elif end == "close":
            stream.close()
        else:
            core.die()
        ended = sorted(endings.get(timeout=DEADLINE_S) for _ in threads)
        assert ended.count("[]") < 3 or end == "close"
        assert list(stream) == []
        for thread in threads:
            thread.join(DEADLINE_S)


def test_no_task_of_a_shared_stream_waits_for_ever() -> None:
    async def go() -> None:
        with FakeCore() as core:
            async with AsyncTokenClient(core.address) as client:
                stream = client.generate([1], request_id="r")
                peer, _ = await asyncio.to_thread(core.next, AddRequest)

                async def read() -> list[int]:
                    return tokens_of([output async for output in stream])

                tasks = [asyncio.create_task(read()) for _ in range(3)]
                core.output(peer, "r", [7], finish_reason="length")
                assert sorted(await asyncio.gather(*tasks)) == [[], [], [7]]

    run(go())
