"""Do the token clients end a stream of several choices when the last of them ends, and each choice on its own?"""

import pytest

from ipc.aclient import AsyncTokenClient
from ipc.client import TokenClient
from ipc.errors import RequestError
from ipc.messages import AddRequest, RequestOutput, TokenUpdates
from ipc.params import SamplingParams
from tests.fake_core import CORE_ID, FakeCore
from tests.ipc.test_client import run, tokens_of, wait_for_abort


def three_choices(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """Ends in the order 1, 0, 2; an update has tokens of two."""
    request_id = request.request_id
    for index in range(3):
        core.output(client, request_id, [10 * index], num_output_tokens=1, seed=index, index=index)
    core.output(client, request_id, [11], num_output_tokens=2, finish_reason="stop", seed=1, index=1)
    core.send(client, TokenUpdates(
        core_id=CORE_ID, request_ids=(request_id, request_id, request_id), counts=[2, 1, 1], token_ids=[21, 22, 1, 99],
        num_output_tokens=[3, 2, 3], indices=[2, 0, 1],
    ))  # fmt: skip
    core.output(client, request_id, [2], num_output_tokens=3, finish_reason="length", index=0)
    core.output(client, request_id, [], num_output_tokens=3, finish_reason="abort", index=2)


def check_choices(outputs: list[RequestOutput]) -> None:
    tokens: dict[int, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.index, []).extend(output.new_token_ids)
    assert tokens == {0: [0, 1, 2], 1: [10, 11], 2: [20, 21, 22]}, "what comes of an ended choice is dropped"
    assert [(output.index, output.seed) for output in outputs if output.new_token_ids in ([21, 22], [1])] == [(2, 2), (0, 0)]
    assert outputs[-1].index == 2 and outputs[-1].finish_reason == "abort"


def test_a_stream_of_choices_ends_with_the_last_of_them() -> None:
    with FakeCore(reply=three_choices) as core, TokenClient(core.address) as client:
        for _ in range(2):
            stream = client.generate([1], SamplingParams(n=3), request_id="same")
            check_choices(list(stream))
            assert list(stream) == []

    async def go() -> None:
        with FakeCore(reply=three_choices) as core:
            async with AsyncTokenClient(core.address) as client:
                check_choices([output async for output in client.generate([1], SamplingParams(n=3))])

    run(go())


def test_one_choice_can_be_ended_and_an_error_ends_all() -> None:
    with FakeCore(answers_abort=False) as core, TokenClient(core.address) as client:
        stream = client.generate([1], SamplingParams(n=2), request_id="r")
        peer, _ = core.next(AddRequest)
        stream.end_choice(1, "stop")
        abort = wait_for_abort(core, "r")
        assert (abort.index, abort.reason) == (1, "stop")
        client.abort("r", index=0)
        assert wait_for_abort(core, "r").index == 0
        core.output(peer, "r", [], finish_reason="stop", index=1)
        assert next(stream).index == 1
        core.fail(peer, "r", "internal", "broke")
        with pytest.raises(RequestError, match="broke"):
            next(stream)
        stream.end_choice(0)
        client.abort("other")
        assert wait_for_abort(core, "other").index is None, "nothing was sent of a stream that is over"
        with pytest.raises(RequestError, match="index=-1 must be"):
            client.abort("r", index=-1)


def test_all_last_outputs_of_a_stream_that_was_left_are_kept_from_its_namesake() -> None:
    with FakeCore(answers_abort=False) as core, TokenClient(core.address) as client:
        left = client.generate([1], SamplingParams(n=3), request_id="same")
        peer, _ = core.next(AddRequest)
        core.output(peer, "same", [1], finish_reason="length", index=1)
        assert next(left).index == 1
        left.close()
        wait_for_abort(core, "same")
        again = client.generate([1], SamplingParams(n=2), request_id="same")
        core.next(AddRequest)
        for index in (0, 2):
            core.output(peer, "same", [], finish_reason="abort", index=index)
        core.output(peer, "same", [7], finish_reason="length", index=0)
        core.output(peer, "same", [8], finish_reason="length", index=1)
        assert [(output.index, output.new_token_ids) for output in again] == [(0, [7]), (1, [8])]
        left = client.generate([1], SamplingParams(n=3), request_id="same")
        core.next(AddRequest)
        left.close()
        again = client.generate([1], request_id="same")
        core.next(AddRequest)
        core.fail(peer, "same", "unavailable", "one error for all three")
        core.output(peer, "same", [9], finish_reason="length")
        assert tokens_of(list(again)) == [9]
