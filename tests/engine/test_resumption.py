"""Does a stream go on at the next core where the last one left it? Engine by engine, with cores that answer by script."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine import AsyncClient, Client, Output, SamplingParams
from engine.choices import outputs_by_choice
from engine.resumption import MAX_LOSSES, TimeLeft
from ipc.errors import PeerLost
from ipc.messages import AddRequest
from tests.engine.test_client import fake, ids, run
from tests.fake_core import FakeCore

SEED = 77
ANSWER = list(range(40, 60))
"""What every choice says, each number plus its index."""


def speak(most: int | None) -> Callable[[FakeCore, bytes, AddRequest], None]:
    """A reply: up to ``most`` new tokens of each choice, behind those that it has, and then the core is gone."""

    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        length = request.params.max_tokens or len(ANSWER)
        for index, had in outputs_by_choice(request):
            answer = [token_id + index for token_id in ANSWER[:length]]
            assert had == answer[: len(had)]
            end = length if most is None else min(length, len(had) + most)
            for position in range(len(had), end):
                core.output(
                    client, request.request_id, [answer[position]], index=index, num_output_tokens=position + 1,
                    num_prompt_tokens=len(request.prompt_token_ids), seed=SEED + index,
                    finish_reason="length" if position + 1 == length else None,
                )  # fmt: skip
        if most is not None:
            core.stop_soon()

    return reply


class Cores:
    """One after the other at one address, each with the next reply; the last one stays until the end."""

    def __init__(self, *replies: Callable[[FakeCore, bytes, AddRequest], None], **fields: Any) -> None:
        """``fields``: what the model of all but the first differs in."""
        self._replies = list(replies)
        self._fields = fields
        self.requests: list[AddRequest] = []
        self._core = self._next("tcp://127.0.0.1:0")
        self.address = self._core.address
        self._keeper = threading.Thread(target=self._keep)

    def __enter__(self) -> "Cores":
        self._keeper.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._replies.clear()
        while self._keeper.is_alive():  # it may be on its way to one more
            self._core.die()
            self._keeper.join(0.01)

    def _keep(self) -> None:
        self._core.wait_gone()
        while self._replies:
            self._core = self._next(self.address)
            self._core.wait_gone()

    def _next(self, endpoint: str) -> FakeCore:
        reply = self._replies.pop(0)

        def note(core: FakeCore, client: bytes, request: AddRequest) -> None:
            self.requests.append(request)
            reply(core, client, request)

        core = fake(note, **(self._fields if self.requests else {}))
        core.endpoint = endpoint
        return core.__enter__()


def read_blocking(cores: Cores, params: SamplingParams) -> list[Output]:
    with Client(cores.address, reconnect_s=20) as client:
        return list(client.generate("abc", params))


def read_async(cores: Cores, params: SamplingParams) -> list[Output]:
    """Whatever is there at once, then the next."""

    async def go() -> list[Output]:
        outputs: list[Output] = []
        async with AsyncClient(cores.address, reconnect_s=20) as client:
            generation = client.generate("abc", params)
            while (output := generation.poll() or await anext(generation, None)) is not None:
                outputs.append(output)
        return outputs

    return asyncio.run(asyncio.wait_for(go(), 60))


readers = pytest.mark.parametrize("read", [read_blocking, read_async])


def tokens_of(outputs: Sequence[Output], index: int = 0) -> list[int]:
    """Everything that was said of a choice; each token must have come once."""
    chosen = [output for output in outputs if output.index == index]
    news = [output.token_ids[len(output.token_ids) - output.num_new_tokens :] for output in chosen]
    assert list(itertools.chain(*news)) == chosen[-1].token_ids
    return chosen[-1].token_ids


@readers
def test_a_stream_goes_on_with_the_seed_and_the_tokens_that_it_had(read: Any) -> None:
    with Cores(speak(7), speak(None)) as cores:
        outputs = read(cores, SamplingParams(max_tokens=20))
    assert tokens_of(outputs) == ANSWER and outputs[-1].finish_reason == "length"
    assert [output.finish_reason for output in outputs].count(None) == len(outputs) - 1
    first, second = cores.requests
    assert second.request_id == first.request_id and second.prompt_token_ids.tolist() == first.prompt_token_ids.tolist()
    assert first.params.seed is None and second.params.seed == SEED
    assert second.output_token_ids.tolist() == ANSWER[:7] and not second.indices


@readers
def test_choices_go_on_each_with_its_own_and_those_that_are_over_stay_so(read: Any) -> None:
    def uneven(core: FakeCore, client: bytes, request: AddRequest) -> None:
        for index, count in ((0, 3), (1, 20), (2, 0)):
            for position in range(count):
                core.output(
                    client, request.request_id, [ANSWER[position] + index], index=index, seed=SEED + index,
                    num_output_tokens=position + 1, finish_reason="length" if position == 19 else None,
                )  # fmt: skip
        core.stop_soon()

    with Cores(uneven, speak(None)) as cores:
        outputs = read(cores, SamplingParams(max_tokens=20, n=3))
    assert [tokens_of(outputs, index) for index in range(3)] == [[t + index for t in ANSWER] for index in range(3)]
    assert [output.index for output in outputs if output.finish_reason is not None] == [1, 0, 2]
    second = cores.requests[1]
    assert (second.params.seed, second.indices, second.counts) == (SEED, [0, 2], [3, 0])


@readers
def test_what_nothing_was_told_of_is_asked_for_as_it_was(read: Any) -> None:
    with Cores(speak(0), speak(None)) as cores:
        outputs = read(cores, SamplingParams(max_tokens=5, n=2))
    assert tokens_of(outputs, 1) == [t + 1 for t in ANSWER[:5]]
    second = cores.requests[1]
    assert second.params.seed is None and not second.output_token_ids.size and not second.indices


@readers
@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_without_the_first_choice_s_seed_others_that_were_begun_can_not_go_on(finish_reason: str | None, read: Any) -> None:
    def begin_second(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.output(client, request.request_id, [41], index=1, seed=9, num_output_tokens=1, finish_reason=finish_reason)
        core.stop_soon()

    with Cores(begin_second, speak(None)) as cores, pytest.raises(PeerLost, match="before it told the seed"):
        read(cores, SamplingParams(max_tokens=20, n=2))


@readers
def test_cores_that_die_again_and_again_are_followed_while_tokens_come(read: Any) -> None:
    num_losses = MAX_LOSSES + 2
    with Cores(*[speak(3)] * num_losses, speak(None)) as cores:
        outputs = read(cores, SamplingParams(max_tokens=20))
    assert tokens_of(outputs) == ANSWER
    assert len(cores.requests) == num_losses + 1


def test_a_request_that_no_core_survives_is_given_up() -> None:
    with Cores(*[speak(0)] * (MAX_LOSSES + 1)) as cores, Client(cores.address, reconnect_s=20) as client:
        generation = client.generate("abc", SamplingParams(max_tokens=20))
        with pytest.raises(PeerLost, match="is gone"):
            next(generation)
        assert len(cores.requests) == MAX_LOSSES + 1


def test_stop_strings_and_text_go_on_over_the_seam() -> None:
    """"hello" is begun at one core and ended at the next, which hears that the stop string was met."""
    spoken = ids("say hello, world")

    def reply(core: FakeCore, client: bytes, request: AddRequest) -> None:
        had = request.output_token_ids.size
        end = 6 if not had else len(spoken)
        for position in range(had, end):
            core.output(client, request.request_id, [spoken[position]], num_output_tokens=position + 1, seed=SEED)
        if not had:
            core.stop_soon()

    with Cores(reply, reply) as cores:
        outputs = read_blocking(cores, SamplingParams(max_tokens=40, stop=("hello",)))
    assert outputs[-1].text == "say " and outputs[-1].stop_reason == "hello"
    assert "".join(output.delta for output in outputs) == "say "


@readers
def test_another_model_does_not_go_on(read: Any) -> None:
    with Cores(speak(3), speak(None), vocab_size=300) as cores, pytest.raises(PeerLost, match="serves another model now"):
        read(cores, SamplingParams(max_tokens=20))


@readers
def test_without_leave_to_reconnect_the_first_loss_is_the_end(read: Any) -> None:
    with Cores(speak(3)) as cores:
        if read is read_blocking:
            with Client(cores.address) as client, pytest.raises(PeerLost, match="is gone"):
                list(client.generate("abc"))
            return

        async def go() -> None:
            async with AsyncClient(cores.address) as client:
                with pytest.raises(PeerLost, match="is gone"):
                    async for _ in client.generate("abc"):
                        continue

        run(go())


def test_the_time_that_a_request_has_runs_on() -> None:
    now = [100.0]
    left = TimeLeft(10.0, lambda: now[0])
    now[0] = 104.0
    assert left() == 6.0
    now[0] = 200.0
    assert 0 < (left() or 0) < 0.01
    assert TimeLeft(None)() is None


def test_a_stream_that_is_closed_while_the_engine_is_sought_stays_closed() -> None:
    with Cores(speak(2), speak(2)) as cores, Client(cores.address, reconnect_s=20) as client:
        generation = client.generate("abc", SamplingParams(max_tokens=20))
        assert [next(generation).num_new_tokens, next(generation).num_new_tokens] == [1, 1]
        generation.close()
        assert list(generation) == []
    assert len(cores.requests) == 1
