"""Does the server do what its own OpenAPI document says, whatever is sent? A hundred calls; with ``-m slow`` two thousand."""

import warnings
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis import HealthCheck

from engine.text.sources import read_text_files
from ipc.messages import AddRequest
from tests.conftest import Checkpoints
from tests.e2e.harness import serve
from tests.fake_core import FakeCore, model_info
from tests.http_server import serving
from tests.tiny import text_ids

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance, response_schema_conformance,
    negative_data_rejection, unsupported_method,
]  # fmt: skip

MAX_WITHOUT_BODY = 20

pytestmark = pytest.mark.filterwarnings("ignore")  # what the fuzzer does inside is not ours to judge


def say_hello(core: FakeCore, client: bytes, request: AddRequest) -> None:
    for index in range(request.params.n):
        core.output(client, request.request_id, text_ids("Hello"), index=index, finish_reason="length")


@pytest.fixture
def stand_in(checkpoints: Checkpoints) -> Iterator[str]:
    files = read_text_files(checkpoints.fx_r)
    info = model_info(
        name="tiny", tokenizer=files.tokenizer, tokenizer_config=files.tokenizer_config, chat_template=files.chat_template, max_model_len=256
    )
    with FakeCore(info=info, reply=say_hello, answers=dict.fromkeys(("health", "stats"), {"ready": True})) as core, serving(core.address) as url:
        yield url


def fuzz(url: str, num_calls: int) -> int:
    """Calls made: of operations with a body these many in all, with bodies that fit the document and such that don't; and few
    of the others, of which there are few to make.
    """
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    posts = [operation for operation in operations if operation.method.upper() == "POST"]
    kinds = [(one, mode) for one in operations for mode in schemathesis.GenerationMode if mode.is_positive or one in posts]
    num_made = 0
    for operation, mode in kinds:
        share = -(-num_calls // (2 * len(posts))) if operation in posts else MAX_WITHOUT_BODY

        @hypothesis.settings(
            max_examples=share, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck),
            phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def call(case: schemathesis.Case) -> None:
            nonlocal num_made
            num_made += 1
            case.call_and_validate(checks=CHECKS, timeout=60)

        call()
    return num_made


def test_a_hundred_calls(stand_in: str) -> None:
    assert fuzz(stand_in, 100) >= 60


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(3600)
def test_two_thousand_calls_before_a_real_engine(checkpoints: Checkpoints) -> None:
    flags = ("--http", "127.0.0.1:0", "--max-model-len", "64", "--max-num-seqs", "64")
    with serve(checkpoints.fx_r, pp=2, flags=flags) as engine:
        line = next(line for line in engine.output.lines if line.startswith("brigade ready"))
        assert fuzz(line.partition("http=")[2], 2000) >= 2000
        engine.settle(60)
