"""Is everything refused at the door that can never be served, with its field and the rule?"""

from typing import Any

import numpy as np
import pytest

from engine.admission import MAX_PROMPT_LOGPROBS, check_request
from ipc.errors import RequestError
from ipc.messages import AddRequest
from ipc.params import SamplingParams
from tests.fake_core import model_info

INFO = model_info(vocab_size=100, eos_token_ids=[1, 2], max_model_len=1 << 20, logits_processors=("a:b",))


def check(prompt: Any = (5, 6), output: Any = (), **params: Any) -> None:
    check_request(
        AddRequest(
            request_id="r", prompt_token_ids=np.asarray(prompt, np.int32), output_token_ids=np.asarray(output, np.int32),
            params=SamplingParams(**params),
        ),
        INFO,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "field", "rule"),
    [
        ({"stop_token_ids": [100]}, "stop_token_ids", "holds 100; ids must be between 0 and 99"),
        ({"logit_bias": {5: 1.0, 100: 1.0}}, "logit_bias", "holds 100; ids must be between 0 and 99"),
        ({"allowed_token_ids": [5, 4000]}, "allowed_token_ids", "holds 4000; ids must be between 0 and 99"),
        ({"bad_word_ids": [[5], [6, 101]]}, "bad_word_ids", "holds 101; ids must be between 0 and 99"),
        ({"bad_words": "cat"}, "bad_words", "send bad_word_ids"),
        ({"allowed_token_ids": [5, 6], "bad_word_ids": [[5], [6]]}, "bad_word_ids", "bars every one of allowed_token_ids"),
        ({"allowed_token_ids": [1, 9], "stop_token_ids": [9], "min_tokens": 1}, "min_tokens", "they all end the answer"),
        ({"logits_processors": {"c:d": {}}}, "logits_processors", "'c:d' is not among those that the engine was started with (a:b)"),
    ],
)  # fmt: skip
def test_refused(params: dict[str, Any], field: str, rule: str) -> None:
    with pytest.raises(RequestError) as refused:
        check(**params)
    assert refused.value.field == field and rule in refused.value.reason


def test_all_log_probabilities_of_long_prompts_are_refused() -> None:
    check([5] * (MAX_PROMPT_LOGPROBS // 100), prompt_logprobs=-1)
    check([5] * (MAX_PROMPT_LOGPROBS // 100 + 1), prompt_logprobs=20, logprobs=-1)
    with pytest.raises(RequestError, match="prompt_logprobs=-1 asks for 16777300 values; at most 16777216"):
        check([5] * (MAX_PROMPT_LOGPROBS // 100 + 1), prompt_logprobs=-1)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [1, 9], "min_tokens": 1}, {"allowed_token_ids": [1], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [5, 6], "bad_word_ids": [[5], [6, 5]]}, {"logit_bias": {99: -100.0}},
        {"logits_processors": {"a:b": {"x": 1}}},
    ],
    ids=str,
)  # fmt: skip
def test_taken(params: dict[str, Any]) -> None:
    check(**params)
