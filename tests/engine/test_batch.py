"""Do batches keep the order of their prompts, and does a client find its engine again? (D10)"""

import asyncio
import io
import threading
from typing import Any

import pytest

from engine import AsyncClient, BatchProgress, Client, Result, SamplingParams
from engine.progress import ProgressBar
from ipc.errors import PeerLost, RequestError
from ipc.messages import AbortRequest, AddRequest
from tests.engine.test_client import fake, ids, run
from tests.fake_core import FakeCore, stay_silent


def echo(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """Says the prompt again, at most ``max_tokens`` of it; each of the choices."""
    tokens = request.prompt_token_ids.tolist()[: request.params.max_tokens]
    for index in range(request.params.n):
        core.output(
            client, request.request_id, tokens, finish_reason="length", index=index, num_output_tokens=len(tokens)
        )


class LateFirst:
    """Answers the first request when all the others were answered."""

    def __init__(self, num_total: int) -> None:
        self.num_total = num_total
        self.num_seen = 0
        self.first: tuple[bytes, AddRequest] | None = None

    def __call__(self, core: FakeCore, client: bytes, request: AddRequest) -> None:
        self.num_seen += 1
        if self.first is None:
            self.first = (client, request)
        else:
            echo(core, client, request)
        if self.num_seen == self.num_total:
            echo(core, *self.first)


PROMPTS = [f"prompt {i} " + "x" * (i * 7 % 40) for i in range(40)]


def batch_of(core: FakeCore, *, is_async: bool, method: str = "generate_batch", **how: Any) -> list[Result]:
    """The same call on either client."""
    args = how.pop("args")

    async def go() -> list[Result]:
        async with AsyncClient(core.address) as client:
            result: list[Result] = await getattr(client, method)(*args, **how)
            return result

    if is_async:
        return asyncio.run(asyncio.wait_for(go(), 60))
    with Client(core.address) as client:
        result: list[Result] = getattr(client, method)(*args, **how)
        return result


both = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])


@both
def test_d10_results_keep_the_order_of_the_prompts_twice(is_async: bool) -> None:
    for _ in range(2):
        with fake(LateFirst(len(PROMPTS))) as core:
            results = batch_of(core, is_async=is_async, args=(PROMPTS,), max_open=7)
        assert [result.text for result in results] == PROMPTS
        assert [result.index for result in results] == list(range(len(PROMPTS)))


@both
def test_no_more_are_open_than_was_said(is_async: bool) -> None:
    class Counting:
        most = now = 0

        def __call__(self, core: FakeCore, client: bytes, request: AddRequest) -> None:
            self.now += 1
            self.most = max(self.most, self.now)
            core._post(lambda: self.answer(core, client, request))

        def answer(self, core: FakeCore, client: bytes, request: AddRequest) -> None:
            self.now -= 1
            echo(core, client, request)

    counting = Counting()
    with fake(counting) as core:
        batch_of(core, is_async=is_async, args=(PROMPTS,), max_open=3)
    assert 1 <= counting.most <= 3


@both
def test_params_may_differ_and_failures_stay_with_their_prompt(is_async: bool) -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        if request.params.max_tokens == 2:
            core.fail(client, request.request_id, "internal", "it broke")
        else:
            echo(core, client, request)

    params = [SamplingParams(max_tokens=m) for m in (1, 2, 3)]
    with fake(reply) as core:
        first, second, third = batch_of(core, is_async=is_async, args=(["abc", "abc", ids("abcd")], params))
        too_long, fine = batch_of(core, is_async=is_async, args=(["x" * 100, "ok"],))
    assert (first.text, third.text, fine.text) == ("a", "abc", "ok")
    assert second.outputs == () and isinstance(second.error, RequestError)
    with pytest.raises(RequestError, match="it broke"):
        _ = second.text
    with pytest.raises(RequestError, match="prompt has 100 tokens"):
        _ = too_long.output


@both
def test_choices_and_conversations(is_async: bool) -> None:
    with fake(echo) as core:
        (result,) = batch_of(core, is_async=is_async, args=(["ab"], SamplingParams(n=3)))
        assert [(o.index, o.text) for o in result.outputs] == [(0, "ab"), (1, "ab"), (2, "ab")]
        chats = batch_of(core, is_async=is_async, method="chat_batch", args=([[{"role": "user", "content": w}] for w in ("hi", "yo")],))
        assert [chat.text for chat in chats] == ["hi", "yo"]
        assert batch_of(core, is_async=is_async, args=([],)) == []


@both
def test_progress_counts_up_to_the_end(is_async: bool) -> None:
    seen: list[BatchProgress] = []
    with fake(echo) as core:
        batch_of(core, is_async=is_async, args=(["abc", "de", "x" * 90],), progress=seen.append)
    assert seen[-1] == BatchProgress(num_total=3, num_done=3, num_failed=1, num_tokens=5)
    assert [p.num_done for p in seen] == sorted(p.num_done for p in seen)


@both
@pytest.mark.parametrize(
    ("args", "how", "field", "said"),
    [
        (("abc",), {}, "prompts", "must be a list of prompts"),
        ((5,), {}, "prompts", "must be a list of prompts"),
        ((["a", "b"], [SamplingParams()]), {}, "params", "params has 1 entries for 2 prompts"),
        ((["a"], {"top_k": 1}), {}, "params", "must be SamplingParams or a list"),
        ((["a"],), {"max_open": 0}, "max_open", "max_open=0 must be an integer of at least 1"),
        ((["a"],), {"progress": 7}, "progress", "progress=7 must be true, false or a function"),
    ],
)
def test_a_batch_that_can_not_be_meant_is_refused(is_async: bool, args: Any, how: Any, field: str, said: str) -> None:
    with fake(echo) as core, pytest.raises(RequestError, match=said) as caught:
        batch_of(core, is_async=is_async, args=args, **how)
    assert caught.value.field == field


@both
def test_when_the_engine_goes_every_open_prompt_says_so(is_async: bool) -> None:
    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        echo(core, client, request)
        if request.prompt_token_ids.tolist() == ids("last"):
            core.stop_soon()

    with fake(reply) as core:
        results = batch_of(core, is_async=is_async, args=(["a", "last", "b", "c"],), max_open=1)
    assert [result.text for result in results[:2]] == ["a", "last"]
    assert all(isinstance(result.error, PeerLost) for result in results[2:])


def test_leaving_a_batch_early_ends_what_is_open() -> None:
    def interrupt(progress: BatchProgress) -> None:
        raise KeyboardInterrupt

    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, ids("a"))

    with fake(reply) as core, Client(core.address) as client:
        with pytest.raises(KeyboardInterrupt):
            client.generate_batch(["a", "b"], progress=interrupt)
        assert len({core.next(AbortRequest)[1].request_id for _ in range(2)}) == 2


# ------------------------------------------------------------------------------------------------------- progress bar


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.progress._rich", lambda *args: None)
    for stream, expected in ((FakeTerminal(), "2/2 answers, 1 failed"), (io.StringIO(), "")):
        with ProgressBar(2, stream) as bar:
            bar(BatchProgress(num_total=2, num_done=2, num_failed=1, num_tokens=9))
        assert expected in stream.getvalue() and bool(stream.getvalue()) == bool(expected)


def test_rich_draws_the_bar_where_it_is() -> None:
    pytest.importorskip("rich")
    stream = FakeTerminal()
    with ProgressBar(3, stream) as bar:
        bar(BatchProgress(num_total=3, num_done=2, num_tokens=9))
    assert "2/3" in stream.getvalue() and "answers" in stream.getvalue()


# -------------------------------------------------------------------------------------------------------- reconnecting


def after(first: FakeCore, **fields: Any) -> FakeCore:
    """Another core at the address of one that is going."""
    first.die()
    core = fake(echo, **fields)
    core.endpoint = first.address
    return core


def lose(core: FakeCore, client: bytes, request: AddRequest) -> None:
    core.stop_soon()


def lost(core: FakeCore, client: Client) -> None:
    """Let the core go while nothing is open, and the client notice."""
    stream = client._attachment.tokens.generate([5, 6])  # of this attachment alone
    core.next(AddRequest)
    core.die()
    with pytest.raises(PeerLost, match="is gone"):
        list(stream)


async def lost_async(core: FakeCore, client: AsyncClient) -> None:
    stream = client._attachment_now().tokens.generate([5, 6])
    await asyncio.to_thread(core.next, AddRequest)
    core.die()
    with pytest.raises(PeerLost, match="is gone"):
        await anext(stream)


def test_a_client_finds_the_next_engine_if_it_may() -> None:
    with fake(stay_silent) as core, Client(core.address, reconnect_s=20) as client:
        lost(core, client)
        with after(core, name="second", max_model_len=32):
            assert list(client.generate("again"))[-1].text == "again"
            assert client.model.name == "second" and client.stats()["running"] == 1
            with pytest.raises(RequestError, match="the context limit is 32"):
                client.generate("x" * 40)


def test_a_client_that_may_not_reconnect_stays_lost() -> None:
    with fake(lose) as core, Client(core.address) as client:
        with pytest.raises(PeerLost):
            list(client.generate("a"))
        with after(core), pytest.raises(PeerLost, match="is gone"):
            client.generate("again")


def test_the_time_to_reconnect_has_an_end_and_close_is_final() -> None:
    with fake(lose) as core:
        client = Client(core.address, reconnect_s=0.1)
        with pytest.raises(PeerLost, match="no engine answered at .* within 0.1 s"):
            list(client.generate("a"))
        with pytest.raises(PeerLost, match="no engine answered at .* within 0.1 s"):
            client.generate("again")
        client.close()
        with after(core), pytest.raises(PeerLost, match="closed|gone"):
            client.generate("again")
    with pytest.raises(RequestError, match="reconnect_s=-1 must be a number of seconds"):
        Client(reconnect_s=-1)
    with pytest.raises(RequestError, match="reconnect_s='x' must be a number of seconds"):
        AsyncClient(reconnect_s="x")  # type: ignore[arg-type]


def test_threads_that_find_the_engine_gone_attach_once_together() -> None:
    with fake(stay_silent) as core, Client(core.address, reconnect_s=20) as client:
        lost(core, client)
        texts: list[str] = []
        with after(core) as second:
            threads = [threading.Thread(target=lambda: texts.append(list(client.generate("t"))[-1].text)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert texts == ["t"] * 8
            assert len({second.next(AddRequest)[0] for _ in range(8)}) == 1


def test_the_async_client_finds_the_next_engine_if_it_may() -> None:
    async def go() -> None:
        with fake(stay_silent) as core:
            async with AsyncClient(core.address, reconnect_s=20) as client:
                await lost_async(core, client)
                with after(core, name="second") as second:
                    generations = [client.generate("again"), client.chat([{"role": "user", "content": "hi"}])]
                    assert await asyncio.gather(*map(collect, generations)) == ["again", "hi"]
                    assert client.model.name == "second" and (await client.stats())["running"] == 1
                    assert len({second.next(AddRequest)[0] for _ in range(2)}) == 1
                    second.reply = stay_silent
                    await lost_async(second, client)
                left = client.generate("never sent")
                await left.aclose()
                assert [output async for output in left] == []

    async def collect(generation: Any) -> str:
        text = ""
        async for output in generation:
            text = output.text
        return text

    run(go())


def test_a_cancelled_wait_for_the_engine_ends_the_generation() -> None:
    async def go() -> None:
        with fake(stay_silent) as core:
            async with AsyncClient(core.address, reconnect_s=20) as client:
                await lost_async(core, client)
                generation = client.generate("b")
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(generation), 0.1)
                assert [output async for output in generation] == []

    run(go())

