"""The options for how tokens are chosen and when an answer ends: one table for every command that sends requests.

Names, types and defaults come from SamplingParams and StructuredOutput; so do the rules, which are checked there.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import click

from ipc.errors import RequestError
from ipc.params import ALL_LOGPROBS, LOGPROBS_MODES, MAX_LOGPROBS, DrawRules, SamplingParams
from ipc.structured import StructuredOutput
from scripts.options import TopicOption

CHOOSING, ENDING, RESTRICTING, FORM, TELLING, CACHING = (
    "Choosing tokens", "Ending the answer", "Tokens that may come", "Form of the answer (one of these)", "What is told",
    "Prefix cache",
)  # fmt: skip

DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}

_OPEN = {"max_tokens": "up to the model's limit", "seed": "drawn by the engine", "allowed_token_ids": "all"}
"""What None stands for."""


class TokenBias(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A token id and what is added to its logit: 42=-100."""

    name = "bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Both as numbers; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        token_id, _, bias = value.partition("=")
        try:
            return int(token_id), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a number such as 42=-100", param, ctx)


class TokenIds(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Token ids with commas between them: 17,4."""

    name = "ids"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The ids; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(word) for word in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of token ids such as 17,4", param, ctx)


class Processor(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A processor's name, and behind a = its arguments as a JSON object."""

    name = "processor"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        """Name and arguments; fails with a usage error."""
        if isinstance(value, tuple):
            return value
        name, _, arguments = value.partition("=")
        try:
            return name, json.loads(arguments or "{}")
        except ValueError as error:
            self.fail(f"{value!r:.80}: what is behind the = must be a JSON object: {error}", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One option."""

    field: str
    """Of SamplingParams; the fields of StructuredOutput have FORM as their topic."""
    topic: str
    names: tuple[str, ...]
    kind: Any = None
    """A click type; None for a flag."""
    help: str
    metavar: str | None = None
    is_list: bool = False
    is_file: bool = False
    """The option names a file with the value."""


def _row(topic: str, field: str, kind: Any, text: str, names: str = "", **more: Any) -> Row:
    spelled = tuple((names or "--" + field.replace("_", "-")).split())
    return Row(field=field, topic=topic, names=spelled, kind=kind, help=text, **more)


_FILE = click.Path(exists=True, dir_okay=False, allow_dash=False)

TABLE: tuple[Row, ...] = (
    _row(CHOOSING, "temperature", float, "Divides the logits; 0 always takes the likeliest token."),
    _row(CHOOSING, "top_k", int, "Draw from the k likeliest tokens; 0 from all."),
    _row(CHOOSING, "top_p", float, "Draw from the likeliest whose probabilities add up to this."),
    _row(CHOOSING, "min_p", float, "Draw from tokens of at least this share of the likeliest one's probability."),
    _row(CHOOSING, "typical_p", float, "Draw from tokens of about average surprise, up to this sum."),
    _row(CHOOSING, "repetition_penalty", float, "Makes tokens of prompt and answer less likely above 1, more below."),
    _row(CHOOSING, "presence_penalty", float, "Taken from the logits of tokens that the answer has."),
    _row(CHOOSING, "frequency_penalty", float, "Taken from a token's logit as often as the answer has it."),
    _row(CHOOSING, "seed", int, "Same seed, same tokens."),
    _row(CHOOSING, "n", int, "Answers to each prompt, with seeds derived from one."),
    _row(CHOOSING, "logits_processors", Processor(), "Function that the engine was started with, and its arguments.",
         "--logits-processor", metavar="NAME[={…}]", is_list=True),
    _row(ENDING, "max_tokens", int, "Most tokens to generate."),
    _row(ENDING, "min_tokens", int, "Nothing ends the answer among its first so many tokens."),
    _row(ENDING, "stop", str, "End the answer before this text.", metavar="TEXT", is_list=True),
    _row(ENDING, "stop_token_ids", int, "End after this token.", "--stop-token-id", metavar="ID", is_list=True),
    _row(ENDING, "ignore_eos", None, "Go on after the model's own end token."),
    _row(RESTRICTING, "logit_bias", TokenBias(), "Add a number to a token's logit.", metavar="ID=NUMBER", is_list=True),
    _row(RESTRICTING, "allowed_token_ids", int, "A token that the answer may have; none but these.",
         "--allowed-token-id", metavar="ID", is_list=True),
    _row(RESTRICTING, "bad_words", str, "A word that the answer can't have.", "--bad-word", metavar="TEXT", is_list=True),
    _row(RESTRICTING, "bad_word_ids", TokenIds(), "The same as token ids.", metavar="ID,ID,…", is_list=True),
    _row(FORM, "json_schema", _FILE, "JSON that fits this schema.", metavar="FILE", is_file=True),
    _row(FORM, "json_object", None, "A JSON object."),
    _row(FORM, "regex", str, "All of it matches this regular expression.", metavar="PATTERN"),
    _row(FORM, "choice", str, "It is one of these.", metavar="TEXT", is_list=True),
    _row(FORM, "grammar", _FILE, "Of the language of this grammar, in Lark or EBNF.", metavar="FILE", is_file=True),
    _row(TELLING, "skip_special_tokens", None, "Whether special tokens are left out of the text.",
         "--skip-special-tokens/--show-special-tokens"),
    _row(TELLING, "include_stop_str_in_output", None, "Keep the stop string at the end of the text."),
    _row(TELLING, "echo", None, "The text begins with the prompt's."),
    _row(TELLING, "logprobs", int, "Tell each token's log probability and those of so many most likely ones; "
         f"up to {MAX_LOGPROBS}, or {ALL_LOGPROBS} for all."),
    _row(TELLING, "prompt_logprobs", int, "The same for the tokens of the prompt."),
    _row(TELLING, "logprobs_mode", click.Choice(LOGPROBS_MODES), "Of the model's own logits, or of what was drawn from."),
    _row(CACHING, "prefix_caching", None, "Share computed beginnings of prompts with other requests.",
         "--prefix-caching/--no-prefix-caching"),
    _row(CACHING, "cache_salt", str, "Share them only with requests that give the same text.", metavar="TEXT"),
)  # fmt: skip

TEXT_FIELDS = ("stop", "bad_words", "skip_special_tokens", "include_stop_str_in_output", "echo")
"""Those that need a client that knows the text."""


def sampling_options(*, without: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command with the options of the table, but for these fields. They arrive under the names of the fields."""
    left_out = set(without)
    rows = [row for row in TABLE if row.field not in left_out]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in reversed(rows):
            function = _option(row)(function)
        return function

    return decorate


def _option(row: Row) -> Callable[[Any], Any]:
    how: dict[str, Any] = {"type": row.kind, "multiple": row.is_list, "metavar": row.metavar}
    if row.kind is None:
        how = {"is_flag": True, "default": _default_flag(row)}
    repeated = " Repeatable." if row.is_list else ""
    text = row.help + repeated + _default_text(row)
    if row.kind is not None and not row.is_list:
        how["default"] = None  # what was not given is left to SamplingParams
    return click.option(*row.names, row.field, cls=TopicOption, topic=row.topic, help=text, **how)


def _default_flag(row: Row) -> bool:
    return bool(DEFAULTS.get(row.field, False))


def _default_text(row: Row) -> str:
    """As the help shows it; nothing for lists, and for a form, which is none by default."""
    if row.field in DrawRules._fields:
        return f"  [default: the model's, else {getattr(DrawRules(), row.field):g}]"
    if row.field in _OPEN:
        return f"  [default: {_OPEN[row.field]}]"
    if row.is_list or row.topic == FORM:
        return ""
    if row.kind is None and "/" in row.names[0]:
        yes, no = row.names[0].split("/")
        return f"  [default: {(yes if _default_flag(row) else no).removeprefix('--')}]"
    default = DEFAULTS[row.field]
    return "" if row.kind is None else f"  [default: {'none' if default is None else default}]"


def sampling_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for SamplingParams from what the options gave. Raises RequestError for a file that can't be read."""
    values: dict[str, Any] = {}
    form: dict[str, Any] = {}
    for row in TABLE:
        value = given.get(row.field)
        if value is None or (row.is_list and not value):
            continue
        if row.topic != FORM:
            values[row.field] = dict(value) if row.field == "logits_processors" else value
        elif value is not False:
            form[row.field] = read_text(value) if row.is_file else value
    if form:
        values["structured"] = StructuredOutput(**form)
    return values


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The same as SamplingParams. Raises RequestError naming field, value and rule."""
    return SamplingParams(**sampling_values(given))


def read_text(name: str, *, dash_is_stdin: bool = False) -> str:
    """A file's text; raises RequestError."""
    try:
        raw = sys.stdin.buffer.read() if dash_is_stdin and name == "-" else Path(name).read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise RequestError(f"{name}: {error.strerror}") from None


def value_of_text(name: str, text: str) -> Any:
    """The value of a sampling parameter as a person types it: JSON, or text where that is what the parameter is.

    ``none`` and ``null`` stand for its default. Raises RequestError for a name that is not one.
    """
    if name not in DEFAULTS:
        known = ", ".join(DEFAULTS)
        raise RequestError(f"{name[:64]} is not a sampling parameter; there are {known}", field=name)
    if text.lower() in ("none", "null"):
        return DEFAULTS[name]
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if name in ("stop", "bad_words", "cache_salt", "logprobs_mode") and not isinstance(value, list):
        return value if isinstance(value, str) else text  # stop=5 is the text 5
    return of_json(name, value)


def of_json(name: str, value: Any) -> Any:
    """A sampling parameter as SamplingParams wants it: names in JSON objects are texts, also where token ids are meant."""
    if name == "logit_bias" and isinstance(value, dict):
        return {int(key) if key.isascii() and key.isdecimal() else key: bias for key, bias in value.items()}
    return value
