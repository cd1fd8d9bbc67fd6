"""Do the token clients deliver every stream, end it once, and notice at once when the core is gone?"""

import asyncio
import gc
import queue
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipc.aclient import AsyncTokenClient
from ipc.client import TokenClient
from ipc.codec import encode
from ipc.errors import PeerLost, RequestError
from ipc.messages import AbortRequest, AddRequest, Attach, Control, ControlReply, RequestOutput, TokenUpdates
from ipc.params import SamplingParams
from tests.fake_core import CORE_ID, DEADLINE_S, FakeCore, model_info, say, stay_silent

DEAD = "tcp://127.0.0.1:1"


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 3 * DEADLINE_S))


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def wait_for_abort(core: FakeCore, request_id: str) -> AbortRequest:
    _, abort = core.next(AbortRequest)
    assert abort.request_id == request_id
    return abort  # type: ignore[no-any-return]


def failure_of(call: Any) -> BaseException:
    """What a call in a thread of its own raises; it must come soon."""
    caught: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def act() -> None:
        try:
            call()
        except (PeerLost, RequestError) as error:
            caught.put(error)
        else:
            caught.put(None)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    error = caught.get(timeout=DEADLINE_S)
    thread.join()
    assert error is not None
    return error


# --------------------------------------------------------------------------------------------------------- attach


def test_attach_tells_what_is_served() -> None:
    with FakeCore(info=model_info(name="tiny", max_model_len=99)) as core, TokenClient(core.address, name="test 1") as client:
        assert (client.model.name, client.model.max_model_len) == ("tiny", 99)
        assert core.next(Attach)[1].client == "test 1"


def test_attach_over_ipc(tmp_path: Path) -> None:
    with FakeCore(endpoint=f"ipc://{tmp_path}/core", reply=say([3])) as core, TokenClient(core.address) as client:
        assert tokens_of(list(client.generate([1]))) == [3]


@pytest.mark.parametrize("address", [DEAD, "ipc:///tmp/brigade-test-nobody-is-here"])
def test_a_dead_address_is_peer_lost_within_the_timeout(address: str) -> None:
    started = time.monotonic()
    with pytest.raises(PeerLost, match=f"no engine answered at {address} within 0.2 s"):
        TokenClient(address, timeout_s=0.2)
    assert time.monotonic() - started < DEADLINE_S

    async def go() -> None:
        with pytest.raises(PeerLost, match=f"no engine answered at {address} within 0.2 s"):
            async with AsyncTokenClient(address, timeout_s=0.2):
                pass

    run(go())


def test_a_core_that_does_not_answer_is_peer_lost() -> None:
    with FakeCore(answers_attach=False) as core, pytest.raises(PeerLost, match="no engine answered at tcp.* within 0.1 s"):
        TokenClient(core.address, timeout_s=0.1)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://", "tcp://127.0.0.1:x", "http://localhost:1"])
def test_text_that_is_no_address(address: str) -> None:
    with pytest.raises(RequestError, match="must be tcp") as caught:
        TokenClient(address)
    assert caught.value.field == "addr"

    async def go() -> None:
        with pytest.raises(RequestError, match="must be tcp"):
            await AsyncTokenClient(address).attach()

    run(go())


@pytest.mark.parametrize("address", [None, 5757, b"tcp://127.0.0.1:1"])
def test_what_is_no_text_at_all(address: Any) -> None:
    with pytest.raises(RequestError, match="addr=.* must be a text such as tcp://") as caught:
        TokenClient(address)
    assert caught.value.field == "addr"

    async def go() -> None:
        with pytest.raises(RequestError, match="addr=.* must be a text"):
            await AsyncTokenClient(address).attach()

    run(go())


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "5", None, True])
def test_what_is_no_time_to_wait(timeout_s: Any) -> None:
    for kind in (TokenClient, AsyncTokenClient):
        with pytest.raises(RequestError, match="timeout_s=.* must be a number of seconds from 0 to 1e") as caught:
            kind(DEAD, timeout_s=timeout_s)
        assert caught.value.field == "timeout_s"
    with FakeCore() as core, TokenClient(core.address) as client:
        with pytest.raises(RequestError, match="timeout_s="):
            client.stats(timeout_s)

        async def go() -> None:
            async with AsyncTokenClient(core.address) as client:
                with pytest.raises(RequestError, match="timeout_s="):
                    await client.health(timeout_s)

        run(go())


def test_a_core_that_comes_up_later_is_found(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/late"
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def attach() -> None:
        with TokenClient(address, timeout_s=DEADLINE_S) as client:
            found.put(client.model.name)

    thread = threading.Thread(target=attach)
    thread.start()
    with FakeCore(endpoint=address):
        assert found.get(timeout=DEADLINE_S) == "fake"
    thread.join()


def test_a_core_that_dies_before_it_answers_is_greeted_again(tmp_path: Path) -> None:
    """Each connection gets an Attach of its own, since what was sent to a dead core is lost."""
    address = f"ipc://{tmp_path}/again"
    attached: queue.SimpleQueue[int] = queue.SimpleQueue()

    def attach() -> None:
        with TokenClient(address, timeout_s=DEADLINE_S) as client:
            attached.put(client.model.core_id)

    thread = threading.Thread(target=attach)
    with FakeCore(endpoint=address, answers_attach=False) as first:
        thread.start()
        first.next(Attach)
    with FakeCore(endpoint=address):
        assert attached.get(timeout=DEADLINE_S) == CORE_ID
    thread.join()


# -------------------------------------------------------------------------------------------------------- streams


def test_outputs_come_in_order_and_end_with_the_finish_reason() -> None:
    with FakeCore(reply=say([5, 6, 7], "stop", stop_reason=7)) as core, TokenClient(core.address) as client:
        stream = client.generate(np.array([1, 2]), SamplingParams(top_k=3), "mine", priority=-2)
        outputs = list(stream)
        assert tokens_of(outputs) == [5, 6, 7]
        assert [o.finish_reason for o in outputs] == [None, None, "stop"]
        assert outputs[-1].stop_reason == 7
        assert list(stream) == []
        _, request = core.next(AddRequest)
        assert (request.request_id, request.prompt_token_ids.tolist(), request.params, request.priority) == (
            "mine", [1, 2], SamplingParams(top_k=3), -2,
        )  # fmt: skip


def updating(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """A first output, two tokens as updates beside those of a request that nobody knows, and a last output."""
    assert request.takes_updates
    request_id = request.request_id
    core.output(client, request_id, [5], num_output_tokens=1, seed=9, num_prompt_tokens=2, num_cached_tokens=1)
    core.send(client, TokenUpdates(
        core_id=CORE_ID, request_ids=("stranger", request_id), counts=[1, 2], token_ids=[99, 6, 7], num_output_tokens=[4, 3]
    ))
    core.output(client, request_id, [8], num_output_tokens=4, seed=9, finish_reason="length")


def check_updated(outputs: list[RequestOutput]) -> None:
    assert [output.new_token_ids for output in outputs] == [[5], [6, 7], [8]]
    middle = outputs[1]
    assert (middle.num_output_tokens, middle.seed, middle.num_prompt_tokens, middle.num_cached_tokens) == (3, 9, 2, 1)
    assert middle.finish_reason is None


def test_updates_become_outputs_with_what_was_told_before() -> None:
    with FakeCore(reply=updating) as core, TokenClient(core.address) as client:
        check_updated(list(client.generate([1, 2])))

    async def go() -> None:
        with FakeCore(reply=updating) as core:
            async with AsyncTokenClient(core.address) as client:
                check_updated([output async for output in client.generate([1, 2])])

    run(go())


@pytest.mark.parametrize("counts", [[1], [1, 2], [1, -1], [3, 0]])
def test_updates_whose_columns_contradict_each_other_are_dropped(counts: list[int], caplog: pytest.LogCaptureFixture) -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        request_id = request.request_id
        core.output(client, request_id, [5], num_output_tokens=1)
        core.send(client, TokenUpdates(
            core_id=CORE_ID, request_ids=(request_id, "s"), counts=counts, token_ids=[6, 7], num_output_tokens=[2, 2]
        ))
        core.output(client, request_id, [8], num_output_tokens=2, finish_reason="length")

    with FakeCore(reply=reply) as core, TokenClient(core.address) as client:
        assert tokens_of(list(client.generate([1, 2]))) == [5, 8]
    assert "TokenUpdates" in caplog.text


def test_many_streams_from_many_threads_are_never_mixed() -> None:
    """Each answer echoes its prompt; 200 requests from 8 threads, some aborted half-way."""

    def echo(core: FakeCore, client: bytes, request: AddRequest) -> None:
        say(request.prompt_token_ids.tolist())(core, client, request)

    wrong: list[Any] = []
    with FakeCore(reply=echo) as core, TokenClient(core.address) as client:

        def work(worker: int) -> None:
            for i in range(25):
                prompt = [worker, i, worker + i, 500]
                stream = client.generate(prompt)
                if i % 5 == 4:
                    next(stream)
                    stream.close()
                elif tokens_of(list(stream)) != prompt:
                    wrong.append(prompt)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_async_streams_are_never_mixed() -> None:
    def echo(core: FakeCore, client: bytes, request: AddRequest) -> None:
        say(request.prompt_token_ids.tolist())(core, client, request)

    async def go() -> None:
        with FakeCore(reply=echo) as core:
            async with AsyncTokenClient(core.address) as client:

                async def one(i: int) -> list[int]:
                    return tokens_of([output async for output in client.generate([i, 7, i])])

                answers = await asyncio.gather(*(one(i) for i in range(60)))
                assert answers == [[i, 7, i] for i in range(60)]

    run(go())


def test_a_failed_request_raises_its_error_and_no_other_one() -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        good, bad = client.generate([1], request_id="good"), client.generate([2], request_id="bad")
        peer, _ = core.next(AddRequest)
        core.next(AddRequest)
        core.fail(peer, "bad", "unavailable", "the queue is full", "prompt_token_ids")
        core.output(peer, "good", [9], finish_reason="length")
        with pytest.raises(RequestError) as caught:
            next(bad)
        error = caught.value
        assert (error.code, error.reason, error.field) == ("unavailable", "the queue is full", "prompt_token_ids")
        assert list(bad) == []
        assert tokens_of(list(good)) == [9]


def test_a_second_request_under_an_open_id_is_refused() -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        first = client.generate([1], request_id="same")
        peer, _ = core.next(AddRequest)
        with pytest.raises(RequestError, match="request_id='same' names a request of this client that is still open") as caught:
            next(client.generate([2], request_id="same"))
        assert caught.value.field == "request_id"
        core.output(peer, "same", [4], finish_reason="length")
        assert tokens_of(list(first)) == [4]
        again = client.generate([1], request_id="same")
        core.output(core.next(AddRequest)[0], "same", [5], finish_reason="length")
        assert tokens_of(list(again)) == [5]


@pytest.mark.parametrize("request_id", ["", "x" * 129, 5, "a\ud800"])
def test_bad_request_ids(request_id: Any) -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        for call in (lambda: client.generate([1], request_id=request_id), lambda: client.abort(request_id)):
            with pytest.raises(RequestError, match="must be a text of 1 to 128 characters"):
                call()


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [[1]], [-1], [1 << 31], "text", [1, None], {1: 2}, 5])
def test_prompts_that_can_not_travel(prompt: Any) -> None:
    with FakeCore(reply=say([1])) as core, TokenClient(core.address) as client:
        with pytest.raises(RequestError) as caught:
            client.generate(prompt)
        assert caught.value.field == "prompt" and "prompt" in caught.value.reason
        assert tokens_of(list(client.generate([1]))) == [1]


# ---------------------------------------------------------------------------------------------------------- aborts


def test_abort_gives_a_last_output() -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        stream = client.generate([1], request_id="r")
        client.abort("r")
        client.abort("unknown")
        assert [o.finish_reason for o in stream] == ["abort"]
        client.abort("r")


@pytest.mark.parametrize("how", ["close", "break", "drop", "with", "error"])
def test_leaving_a_stream_early_aborts_the_request(how: str) -> None:
    def first_token(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, [3])

    with FakeCore(reply=first_token) as core, TokenClient(core.address) as client:
        if how == "close":
            stream = client.generate([1], request_id="r")
            next(stream)
            stream.close()
            stream.close()
        elif how == "break":
            for _ in client.generate([1], request_id="r"):
                break
        elif how == "drop":
            client.generate([1], request_id="r")
        elif how == "with":
            with client.generate([1], request_id="r") as stream:
                next(stream)
        else:
            with pytest.raises(KeyError):
                _read_and_raise(client)
        gc.collect()
        assert wait_for_abort(core, "r").reason == "abort"


def _read_and_raise(client: TokenClient) -> None:
    for _ in client.generate([1], request_id="r"):
        raise KeyError


@pytest.mark.parametrize("how", ["aclose", "break", "cancel"])
def test_leaving_an_async_stream_early_aborts_the_request(how: str) -> None:
    def first_token(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, [3])

    async def read(client: AsyncTokenClient) -> None:
        async for _ in client.generate([1], request_id="r"):
            if how == "break":
                break

    async def go() -> None:
        with FakeCore(reply=first_token) as core:
            async with AsyncTokenClient(core.address) as client:
                if how == "aclose":
                    stream = client.generate([1], request_id="r")
                    await anext(stream)
                    await stream.aclose()
                elif how == "break":
                    await read(client)
                else:
                    task = asyncio.create_task(read(client))
                    await asyncio.to_thread(core.next, AddRequest)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    del task
                gc.collect()
                await asyncio.to_thread(wait_for_abort, core, "r")

    run(go())


def test_a_new_request_under_an_aborted_id_gets_nothing_of_the_old_one() -> None:
    """What the old one still sends, and its one final message, come before anything of the new one."""
    with FakeCore(answers_abort=False) as core, TokenClient(core.address) as client:
        for _ in range(3):
            old = client.generate([1], request_id="r")
            peer, _ = core.next(AddRequest)
            old.close()
            wait_for_abort(core, "r")
        new = client.generate([2], request_id="r")
        core.next(AddRequest)
        for token in (100, 101, 102):
            core.output(peer, "r", [token])
            core.output(peer, "r", [token], finish_reason="abort")
        core.output(peer, "r", [5])
        core.output(peer, "r", [6], finish_reason="length")
        assert tokens_of(list(new)) == [5, 6]


def test_closing_the_client_aborts_what_is_open() -> None:
    with FakeCore() as core:
        client = TokenClient(core.address)
        stream = client.generate([1], request_id="r")
        core.next(AddRequest)
        client.close()
        client.close()
        wait_for_abort(core, "r")
        with pytest.raises(PeerLost, match="client was closed"):
            next(stream)
        for call in (client.stats, client.health, lambda: client.generate([1]), lambda: client.abort("r")):
            with pytest.raises(PeerLost, match="client was closed"):
                call()


def test_a_dropped_client_ends_its_thread() -> None:
    before = threading.active_count()
    with FakeCore() as core:
        client = TokenClient(core.address)
        stream = client.generate([1])
        threads = [t for t in threading.enumerate() if t.name == "brigade-client"]
        del client
        assert all(t.is_alive() for t in threads)
        del stream
        gc.collect()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
    assert threading.active_count() == before


# ------------------------------------------------------------------------------------------------------- questions


def test_stats_and_health() -> None:
    with FakeCore() as core, TokenClient(core.address) as client:
        assert client.stats()["running"] == 1
        assert client.health()["op"] == "health"
        assert [core.next(Control)[1].op for _ in range(2)] == ["stats", "health"]


def test_an_error_in_the_answer_is_raised() -> None:
    with FakeCore(answers_control=False) as core, TokenClient(core.address) as client:
        answers: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        thread = threading.Thread(target=lambda: answers.put(failure_of(client.health)))
        thread.start()
        peer, question = core.next(Control)
        core.send(peer, ControlReply(core_id=CORE_ID, control_id=question.control_id + 1, error="", values={"not": "mine"}))
        core.send(peer, ControlReply(core_id=CORE_ID, control_id=question.control_id, error="stage 1 is frozen", values={}))
        error = answers.get(timeout=DEADLINE_S)
        thread.join()
        assert isinstance(error, RequestError) and (error.code, error.reason) == ("unavailable", "stage 1 is frozen")


def test_a_question_without_an_answer_has_a_deadline() -> None:
    with FakeCore(answers_control=False) as core:
        with TokenClient(core.address) as client, pytest.raises(PeerLost, match="did not answer 'stats' within 0.1 s"):
            client.stats(timeout_s=0.1)

        async def go() -> None:
            async with AsyncTokenClient(core.address) as client:
                with pytest.raises(PeerLost, match="did not answer 'health' within 0.1 s"):
                    await client.health(timeout_s=0.1)

        run(go())


# ------------------------------------------------------------------------------------------------------- lost cores


def test_a_lost_core_fails_everything_that_is_open_at_once() -> None:
    with FakeCore(answers_control=False) as core, TokenClient(core.address) as client:
        streams = [client.generate([i]) for i in range(5)]
        for _ in streams:
            core.next(AddRequest)
        errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        asking = threading.Thread(target=lambda: errors.put(failure_of(client.stats)))
        asking.start()
        core.next(Control)
        started = time.monotonic()
        core.die()
        for stream in streams:
            with pytest.raises(PeerLost, match="the core at .* is gone"):
                next(stream)
            assert list(stream) == []
        assert "is gone" in str(errors.get(timeout=DEADLINE_S))
        asking.join()
        assert time.monotonic() - started < DEADLINE_S
        for call in (client.stats, lambda: client.generate([1]), lambda: client.abort("x")):
            with pytest.raises(PeerLost, match="is gone"):
                call()


def say_and_die(core: FakeCore, client: bytes, request: AddRequest) -> None:
    say(request.prompt_token_ids.tolist(), chunk=len(request.prompt_token_ids))(core, client, request)
    core.stop_soon()


def test_what_the_core_sent_before_it_died_is_still_delivered() -> None:
    """The loss may be noticed while messages that came before it wait to be read."""
    for _ in range(25):
        with FakeCore(reply=say_and_die) as core, TokenClient(core.address) as client:
            assert tokens_of(list(client.generate([1, 2]))) == [1, 2]
            with pytest.raises(PeerLost):
                _until_lost(client)

    async def go() -> None:
        for _ in range(25):
            with FakeCore(reply=say_and_die) as core:
                async with AsyncTokenClient(core.address) as client:
                    assert tokens_of([output async for output in client.generate([1, 2])]) == [1, 2]

    run(go())


def _until_lost(client: TokenClient) -> None:
    for _ in range(100):
        client.stats(timeout_s=0.1)


def test_an_async_client_notices_a_lost_core() -> None:
    async def go() -> None:
        with FakeCore(reply=say([1, 2], "length"), answers_control=False) as core:
            async with AsyncTokenClient(core.address) as client:
                done = client.generate([1])
                await asyncio.to_thread(core.next, AddRequest)
                core.reply = stay_silent
                cut = client.generate([1])
                question = asyncio.create_task(client.stats())
                await asyncio.to_thread(core.next, Control)
                await asyncio.to_thread(core.die)
                with pytest.raises(PeerLost, match="is gone"):
                    await anext(cut)
                with pytest.raises(PeerLost, match="is gone"):
                    await question
                assert tokens_of([output async for output in done]) == [1, 2]
                with pytest.raises(PeerLost, match="is gone"):
                    client.generate([1])

    run(go())


def test_an_unattached_async_client_says_so() -> None:
    with pytest.raises(PeerLost, match="not attached"):
        AsyncTokenClient(DEAD).generate([1])


def test_closing_an_async_client_aborts_what_is_open() -> None:
    async def go() -> None:
        with FakeCore() as core:
            async with AsyncTokenClient(core.address) as client:
                stream = client.generate([1], request_id="r")
            with pytest.raises(PeerLost, match="client was closed"):
                await anext(stream)
            await asyncio.to_thread(wait_for_abort, core, "r")

    run(go())


# ------------------------------------------------------------------------------------------------ broken messages


def test_messages_that_are_broken_or_of_another_core_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.send_raw(client, [b"\1", b"\x31", b"\xff"])
        core.send_raw(client, [b""])
        core.send_raw(client, encode(Attach()))
        core.output(client, request.request_id, [66], core_id=CORE_ID + 1, finish_reason="length")
        core.output(client, "somebody else", [67], finish_reason="length")
        core.fail(client, "", "bad_message", "what was that?")
        core.output(client, request.request_id, [7], finish_reason="length")

    with FakeCore(reply=reply) as core:
        with TokenClient(core.address) as client:
            assert tokens_of(list(client.generate([1]))) == [7]

        async def go() -> None:
            async with AsyncTokenClient(core.address) as client:
                assert tokens_of([output async for output in client.generate([1])]) == [7]

        run(go())
    assert "not attached to" in caplog.text and "what was that?" in caplog.text
