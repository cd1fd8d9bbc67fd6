"""Is every sampling parameter an option, with the default that it has, and does what was typed reach it?"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ipc.errors import RequestError
from ipc.params import SamplingParams
from ipc.structured import StructuredOutput
from scripts.bench.command import command as bench
from scripts.generate import command as generate
from scripts.sampling_options import FORM, TABLE, sampling_options, sampling_params, value_of_text


def given(*words: str) -> SamplingParams:
    found: list[SamplingParams] = []

    @click.command()
    @sampling_options()
    def command(**options: Any) -> None:
        found.append(sampling_params(options))

    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_every_parameter_and_every_form_has_an_option() -> None:
    own = {row.field for row in TABLE if row.topic != FORM}
    assert own == {f.name for f in fields(SamplingParams)} - {"structured"}
    assert {row.field for row in TABLE if row.topic == FORM} == {f.name for f in fields(StructuredOutput)}
    assert len({name for row in TABLE for name in row.names}) == len(TABLE)


def test_nothing_given_is_nothing_set() -> None:
    assert given() == SamplingParams()


def test_each_option_reaches_its_parameter(tmp_path: Path) -> None:
    grammar = tmp_path / "g"
    grammar.write_text("start: é", encoding="utf-8")
    assert given(
        "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--min-p", "0.1", "--typical-p", "0.9", "--repetition-penalty", "1.1",
        "--presence-penalty", "0.5", "--frequency-penalty", "-0.5", "--seed", "7", "--n", "2", "--max-tokens", "9", "--min-tokens", "2",
        "--stop", "a", "--stop", "b", "--stop-token-id", "4", "--ignore-eos", "--logit-bias", "5=-1.5", "--logit-bias", "6=2",
        "--allowed-token-id", "5", "--bad-word", "é", "--bad-word-ids", "1,2", "--show-special-tokens", "--include-stop-str-in-output",
        "--echo", "--logprobs", "2", "--prompt-logprobs", "0", "--logprobs-mode", "processed", "--no-prefix-caching", "--cache-salt", "s",
        "--logits-processor", 'a:b={"x": 1}', "--logits-processor", "c:d", "--grammar", str(grammar),
    ) == SamplingParams(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.1, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.5,
        frequency_penalty=-0.5, seed=7, n=2, max_tokens=9, min_tokens=2, stop=("a", "b"), stop_token_ids=(4,), ignore_eos=True,
        logit_bias=((5, -1.5), (6, 2.0)), allowed_token_ids=(5,), bad_words=("é",), bad_word_ids=((1, 2),), skip_special_tokens=False,
        include_stop_str_in_output=True, echo=True, logprobs=2, prompt_logprobs=0, logprobs_mode="processed", prefix_caching=False,
        cache_salt="s", logits_processors={"a:b": {"x": 1}, "c:d": {}}, structured=StructuredOutput(grammar="start: é"),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("words", [("--logit-bias", "5"), ("--bad-word-ids", "a,b"), ("--logits-processor", "a:b={"), ("--top-k", "x")], ids=str)
def test_what_has_not_the_form_is_a_usage_error(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(generate, ["x", *words])
    assert result.exit_code == 2 and words[1].split("=")[0] in result.stderr


def test_help_groups_options_and_shows_defaults() -> None:
    shown = " ".join(CliRunner().invoke(generate, ["--help"]).output.split())
    for words in (
        "Choosing tokens:", "[default: the model's, else 1]", "Ending the answer:", "[default: up to the model's limit]",
        "Form of the answer (one of these):", "[default: skip-special-tokens]", "[default: none]", "[default: raw]", "[default: all]",
        "[default: drawn by the engine]",
    ):  # fmt: skip
        assert words in shown, words


def test_the_benchmark_has_the_same_options_but_for_those_it_sets_itself() -> None:
    own, common = ({p.name for p in command.params} for command in (bench, generate))
    assert {"top_k", "repetition_penalty", "logprobs", "json_schema", "cache_salt"} <= own & common
    assert not own & {"n", "max_tokens", "stop", "echo", "bad_words"}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5), ("stop", "5", "5"), ("stop", '["a", "b"]', ["a", "b"]), ("stop", "a b", "a b"), ("seed", "null", None),
        ("logit_bias", '{"5": -1}', {5: -1}), ("ignore_eos", "true", True), ("top_k", "none", None), ("cache_salt", "7", "7"),
    ],
)  # fmt: skip
def test_values_as_people_type_them(name: str, text: str, value: Any) -> None:
    assert value_of_text(name, text) == value


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(RequestError, match="warmth is not a sampling parameter; there are max_tokens, temperature"):
        value_of_text("warmth", "1")
