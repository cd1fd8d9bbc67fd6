"""How does a model write a call of a tool, and which grammar holds it to that?

A form is a few literals in a row, with blanks allowed between them, around the call's name and its arguments. The model's
chat template tells which one the model was trained on:

===============  ==========================================================================================================
form             text of a call
===============  ==========================================================================================================
tagged           ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``: Hermes, Qwen, and the default
bare             ``{"name": "f", "parameters": {...}}`` and nothing else: Llama 3
listed           ``[TOOL_CALLS][{"name": "f", "arguments": {...}}]``: Mistral
headed           ``[TOOL_CALLS]f[ARGS]{...}``: Mistral's newer models
===============  ==========================================================================================================
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.text.tokenizer import Tokenizer

MAX_CALLS = 32
"""In one answer: a small model that begins to repeat itself comes to an end."""

MAX_BLANKS = 2
"""Between two literals, where a grammar holds the model to the form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """The literals of a form, in order. Blanks may stand in front of each."""

    kind: str
    opening: tuple[str, ...] = ()
    """In front of the first call."""

    before_name: tuple[str, ...]
    before_arguments: tuple[str, ...]
    behind_arguments: tuple[str, ...] = ()
    between: tuple[str, ...] | None = ()
    """Between two calls; None where an answer has one call at most."""

    closing: tuple[str, ...] = ()
    """Behind the last call."""

    is_whole_answer: bool = False
    """An answer is a call from its first character on, or it has none."""

    has_short_ids: bool = False
    """The template takes calls' ids of nine letters and digits only."""

    special_ids: tuple[tuple[str, int], ...] = ()
    """Literals that are special tokens of the model: they can't be spelled, and are text only if special tokens are shown."""

    @property
    def trigger(self) -> str:
        """What calls begin with."""
        return (*self.opening, *self.before_name)[0]

    @property
    def shows_special_tokens(self) -> bool:
        """Answers in this form must be detokenized with ``skip_special_tokens=False``, else their calls are not seen."""
        return bool(self.special_ids)


TAGGED = CallForm(
    kind="tagged", before_name=("<tool_call>", "{", '"name"', ":", '"'), before_arguments=('"', ",", '"arguments"', ":"),
    behind_arguments=("}", "</tool_call>"),
)  # fmt: skip
BARE = CallForm(
    kind="bare", before_name=("{", '"name"', ":", '"'), before_arguments=('"', ",", '"parameters"', ":"),
    behind_arguments=("}",), between=None, is_whole_answer=True,
)  # fmt: skip
LISTED = CallForm(
    kind="listed", opening=("[TOOL_CALLS]", "["), before_name=("{", '"name"', ":", '"'),
    before_arguments=('"', ",", '"arguments"', ":"), behind_arguments=("}",), between=(",",), closing=("]",),
    has_short_ids=True,
)  # fmt: skip
HEADED = CallForm(kind="headed", before_name=("[TOOL_CALLS]",), before_arguments=("[ARGS]",), has_short_ids=True)

FORMS = (TAGGED, BARE, LISTED, HEADED)


def form_of(chat_template: str | None, tokenizer: Tokenizer | None = None) -> CallForm:
    """The form that the template's own calls have; the tagged one for a template that knows none of them.

    ``tokenizer`` tells which of the form's literals are special tokens.
    """
    form = _form_in(chat_template or "")
    literals = {*form.opening, *form.before_name, *form.before_arguments, *form.behind_arguments, *form.closing}
    known = {} if tokenizer is None else {tokenizer.token_bytes(i): i for i in tokenizer.special_ids}
    special = [(literal, known[literal.encode()]) for literal in sorted(literals) if literal.encode() in known]
    return replace(form, special_ids=tuple(special))


def _form_in(template: str) -> CallForm:
    if "[TOOL_CALLS]" in template:
        return HEADED if "[ARGS]" in template else LISTED
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return BARE
    return TAGGED


def call_grammar(form: CallForm, schemas: Mapping[str, Any], *, is_required: bool, is_parallel: bool) -> str:
    """A Lark grammar, in llguidance's dialect: one call or several, and before them, or instead, any text.

    Args:
        schemas: tool's name to the schema of its arguments.
        is_required: the answer begins with a call.
        is_parallel: several calls are allowed, where the form has room for them.
    """
    special = dict(form.special_ids)
    first = [*form.opening, *form.before_name]
    more = ""
    if is_parallel and form.between is not None:
        more = f" (S {_row([*form.between, *form.before_name], special)} call){{0,{MAX_CALLS - 1}}}"
    closing = "".join(" S " + _literal(text, special) for text in form.closing)
    rest = f"call{more}{closing}"
    lines = ["%llguidance {}"]
    if is_required:
        lines.append(f"start: {_row(first, special)} {rest}")
    elif form.is_whole_answer:
        lines.append(f"start: TEXT? | {_row(first, special)} {rest}")
        lines.append(rf"TEXT: /[^{form.trigger}](.|\n)*/")
    else:
        lines.append(f"start: TEXT | head {_row(first[1:], special, leads=True)} {rest}")
        lines.append(r"TEXT: /(.|\n)*/")
        is_token = form.trigger in special
        lines.append(f"{'head' if is_token else 'head[lazy]'}: TEXT {_literal(form.trigger, special)}")
    lines.append("call: " + " | ".join(f"call_{index}" for index in range(len(schemas))))
    for index, (name, schema) in enumerate(schemas.items()):
        # The name and what ends it are one literal: of two names, one may begin like the other.
        before = list(form.before_arguments)
        if before[0] in special:
            head = f"{_literal(name, special)} {_row(before, special)}"
        else:
            head = _row([name + before[0], *before[1:]], special)
        behind = "".join(" S " + _literal(text, special) for text in form.behind_arguments)
        lines.append(f"call_{index}: {head} S %json {json.dumps(schema, ensure_ascii=False)}{behind}")
    lines.append(rf"S: /[ \n]{{0,{MAX_BLANKS}}}/")
    return "\n".join(lines) + "\n"


def _row(literals: Sequence[str], special: Mapping[str, int], *, leads: bool = False) -> str:
    """Literals with room for blanks between them, and in front if it ``leads``. None is allowed behind an opening quote."""
    found = " S ".join(_literal(text, special) for text in literals)
    return f"S {found}" if leads and found else found


def _literal(text: str, special: Mapping[str, int]) -> str:
    return f"<[{special[text]}]>" if text in special else json.dumps(text)
