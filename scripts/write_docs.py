"""Writes the tables in the docs that say what stands in the code: ``python -m scripts.write_docs [--check]``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``; what is around them is written by hand.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import click

from engine.metrics_text import families
from ipc import messages, params, views
from ipc.messages import FloatBuffer, IdBuffer, Ints, MaskBuffer, Scalars, SpanBuffer
from ipc.params import SamplingParams
from ipc.registry import MESSAGE_TYPES
from ipc.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutput
from scripts.cli import main as brigade

FOLDER = Path(__file__).resolve().parents[1] / "docs"
PAGES = ("parameters.md", "protocol.md", "operating.md")
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)
DEFAULT_IN_HELP = re.compile(r"\s*\[default: ([^\]]+)\]$")
MOST_EXACT = 1 << 16

FIELD_RULES = {
    "stop": f"up to {params.MAX_STOP_STRINGS} texts of 1 to {params.MAX_STOP_STRING_CHARS} characters",
    "stop_token_ids": f"up to {params.MAX_STOP_TOKEN_IDS} token ids",
    "cache_salt": f"1 to {params.MAX_CACHE_SALT_CHARS} characters",
    "structured": "a map with one field, below",
    "logit_bias": f"up to {params.MAX_BIASED_TOKENS} pairs of token id and number, "
    f"{-params.MAX_BIAS:g} to {params.MAX_BIAS:g}",
    "allowed_token_ids": f"1 to {params.MAX_ALLOWED_TOKENS} token ids",
    "bad_words": f"up to {params.MAX_BAD_WORDS} texts of 1 to {params.MAX_BAD_WORD_CHARS} characters",
    "bad_word_ids": f"up to {2 * params.MAX_BAD_WORDS} lists of 1 to {params.MAX_BAD_WORD_TOKENS} token ids",
    "logprobs_mode": ", ".join(params.LOGPROBS_MODES),
    "logits_processors": f"up to {params.MAX_PROCESSORS} names, each with up to {params.MAX_PROCESSOR_ARGUMENTS} arguments",
    "json_schema": f"text, up to {MAX_GRAMMAR_BYTES} bytes",
    "regex": f"text, up to {MAX_GRAMMAR_BYTES} bytes",
    "grammar": f"text, up to {MAX_GRAMMAR_BYTES} bytes",
    "choice": f"up to {MAX_CHOICES} texts, {MAX_GRAMMAR_BYTES} bytes together",
}
"""Of parameters that are no numbers and no switches."""


PLAIN_FIELDS = {
    "core_id": "Drawn by the core when it starts: another one is another core.",
    "control_id": "Chosen by the client, and given back with the answer.",
    "request_id": "As the client chose it.",
    "prompt_token_ids": "At least one token.",
    "params": "How tokens are chosen, and when the answer ends.",
    "version": "Of the engine.",
    "name": "Of the model.",
    "num_stages": "Of the pipeline.",
    "vocab_size": "Token ids are below it.",
    "max_num_seqs": "Requests that run at once.",
    "eos_token_ids": "Tokens with which the model ends an answer.",
    "chat_template": "A Jinja template, as the model brought it.",
    "generation_config": "JSON object, as the model brought it.",
    "num_prompt_tokens": "Of the request.",
    "logprobs": "Of the tokens in this message, where the request asked for them.",
    "prompt_logprobs": "Of prompt tokens, where the request asked for them.",
    "start": "Number of the first position's token in prompt and answer, from 0.",
    "num_top": "Most likely tokens at each position.",
    "token_ids": "See below.",
    "request_ids": "As their clients chose them.",
    "ranks": "How many tokens are at least as likely as the position's own, itself included.",
    "code": "See [errors](#errors).",
    "reason": "One line for people: field, value and rule.",
    "field": "Which field or parameter is wrong.",
    "values": "By name.",
    "seconds": "As asked for.",
    "host": "Same text on threads of one machine.",
    "spans": "Four numbers each, see below.",
}
"""What messages leave to their fields' names."""


def render(page: str) -> str:
    """The page with the tables that the code gives now."""
    text = (FOLDER / page).read_text(encoding="utf-8")
    return TABLE.sub(lambda found: f"{found[1]}{table_of(found[2])}{found[3]}", text)


def table_of(name: str) -> str:
    """One table: ``options COMMAND``, ``params CLASS``, ``message CLASS``, ``metrics all``; or ``file NAME``, a program. Raises KeyError for other names."""
    kind, _, what = name.partition(" ")
    makers: dict[str, Callable[[str], str]] = {"options": _options, "params": _params, "message": _message, "metrics": _metrics, "file": _file}
    return makers[kind](what)


def _file(name: str) -> str:
    return f"```python\n{(FOLDER / name).read_text(encoding='utf-8')}```\n"


def _rows(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ------------------------------------------------------------------------------------------------ options


def _options(name: str) -> str:
    command = brigade.get_command(click.Context(brigade), name)
    if command is None:
        raise KeyError(name)
    shown = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    return _rows(("option", "value", "default", "meaning"), (_option(option) for option in shown))


def _option(option: click.Option) -> Sequence[str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    text = option.help or ""
    found = DEFAULT_IN_HELP.search(text)
    default = found[1] if found is not None else _default(option)
    return names, _value(option), default, DEFAULT_IN_HELP.sub("", text)


def _default(option: click.Option) -> str:
    value = option.default
    if option.is_flag:
        return "on" if value is True else "off"
    if option.multiple or value is None or not isinstance(value, (bool, int, float, str)):
        return "–"
    return str(value)


def _value(option: click.Option) -> str:
    kind = option.type
    if option.is_flag:
        return "switch"
    if isinstance(kind, click.IntRange | click.FloatRange):
        least = "above " if kind.min_open else ""
        return f"at least {_number(kind.min)}" if kind.max is None else f"{least}{_number(kind.min)} to {_number(kind.max)}"
    if isinstance(kind, click.Choice):
        return ", ".join(map(str, kind.choices))
    least_s = getattr(kind, "least", None)
    word = "seconds" if least_s is not None else kind.name
    return f"{word}, at least {least_s:g}" if least_s is not None else option.metavar or word


# ------------------------------------------------------------------------------------------------ parameters


def _params(name: str) -> str:
    cls = {"SamplingParams": SamplingParams, "StructuredOutput": StructuredOutput}[name]
    texts = field_texts(cls)
    return _rows(
        ("parameter", "value", "default", "meaning"),
        ((f"`{f.name}`", _rule(cls, f.name), _shown(f.default), texts[f.name]) for f in fields(cls)),
    )


def _rule(cls: type, name: str) -> str:
    if name in params.INTEGER_LIMITS and cls is SamplingParams:
        low, high = params.INTEGER_LIMITS[name]
        return f"integer, {_number(low)} to {_number(high)}"
    if name in params.NUMBER_LIMITS and cls is SamplingParams:
        least, most = params.NUMBER_LIMITS[name]
        return f"number, {'above ' if name in params.ABOVE_ZERO else ''}{least:g} to {most:g}"
    if get_type_hints(cls)[name] is bool:
        return "true or false"
    return FIELD_RULES[name]


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    return {None: "unset", (): "none"}.get(default, f"{default}")  # type: ignore[call-overload]


# ------------------------------------------------------------------------------------------------ metrics


def _metrics(_: str) -> str:
    return _rows(("metric", "type", "labels", "meaning"), (
        (f"`{family.name}`", family.kind, ", ".join(family.labels) or "–", family.text) for family in families()
    ))  # fmt: skip


def _number(value: float | None) -> str:
    """As people write limits."""
    for power in range(17, 64):
        if value == 1 << power:
            return f"2^{power}"
        if value == (1 << power) - 1:
            return f"2^{power} - 1"
    return f"{value:g}" if isinstance(value, float) or (value or 0) < 10**6 else f"{value}"


# ------------------------------------------------------------------------------------------------ messages


def _message(name: str) -> str:
    cls: type = getattr(messages, name, None) or getattr(views, name)
    hints, texts = get_type_hints(cls, include_extras=True), field_texts(cls)
    return _rows(
        ("#", "field", "type", "default", "meaning"),
        ((str(i), f"`{f.name}`", wire_type(hints[f.name]), _wire_default(f), texts.get(f.name) or PLAIN_FIELDS[f.name])
         for i, f in enumerate(fields(cls))),
    )  # fmt: skip


def _wire_default(field: Any) -> str:
    if field.default is MISSING:
        return "**required**" if field.default_factory is MISSING else "empty"
    if isinstance(field.default, bool):
        return "true" if field.default else "false"
    return {None: "nil", "": "empty", b"{}": "`{}`", (): "empty"}.get(field.default, f"{field.default}")


def wire_type(hint: Any) -> str:
    """In which form a field of this type stands in a head."""
    known = {
        str(Ints): "column", str(IdBuffer): "count; int32 buffer", str(FloatBuffer): "count; float32 buffer",
        str(MaskBuffer): "count; int32 buffer", str(SpanBuffer): "count; int64 buffer",
        str(Scalars): "map of text to number, text or boolean",
    }  # fmt: skip
    plain = {int: "integer", float: "number", str: "text", bytes: "bin", bool: "boolean"}
    if str(hint) in known:
        return known[str(hint)]
    if hint in plain:
        return plain[hint]
    if is_dataclass(hint):
        name = hint.__name__  # type: ignore[union-attr]
        return f"map: {name}" if hint is SamplingParams else f"array: {name}"
    args = get_args(hint)
    if get_origin(hint) is Annotated:
        return _bounded(args[0], args[1])
    if get_origin(hint) in (Union, UnionType):
        return f"{wire_type(args[0])}, or nil"
    if get_origin(hint) is tuple:
        return f"array of {wire_type(args[0])}"
    raise TypeError(f"no words for {hint}")


def _bounded(kind: Any, bounds: messages.Bounds) -> str:
    low, high = bounds.low, bounds.high
    if kind is int:
        for bits in (8, 16, 32, 64):
            if (low, high) == (0, (1 << bits) - 1):
                return f"uint{bits}"
            if (low, high) == (-(1 << bits - 1), (1 << bits - 1) - 1):
                return f"int{bits}"
        return f"integer, {_power(low)} to {_power(high)}"
    unit = {str: " bytes" if kind is bytes else " characters", bytes: " bytes"}.get(kind, " values")
    return f"{wire_type(kind)}, {low} to {_power(high)}{unit}"


def _power(value: int) -> str:
    return f"-{_number(-value)}" if value < 0 else _number(value)


# ------------------------------------------------------------------------------------------------ sources


def field_texts(cls: type) -> dict[str, str]:
    """What stands below each field of a dataclass, on one line."""
    texts: dict[str, str] = {}
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, behind in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
            texts[statement.target.id] = " ".join(str(behind.value.value).replace("``", "`").split())
    return texts


def client_messages() -> dict[int, type]:
    """Those between core and clients, by tag."""
    return {tag: cls for tag, cls in MESSAGE_TYPES.items() if "client" in (cls.__doc__ or "").partition(":")[0]}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 when a page is not what the code says.")
def command(check: bool) -> None:
    """Write the tables of the docs from the code."""
    stale = [page for page in PAGES if render(page) != (FOLDER / page).read_text(encoding="utf-8")]
    for page in stale:
        print(f"docs/{page} {'is stale' if check else 'is written'}")
        if not check:
            (FOLDER / page).write_text(render(page), encoding="utf-8")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    command()
