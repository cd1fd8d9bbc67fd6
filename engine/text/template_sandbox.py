"""How much may a chat template do? It is a stranger's program, and runs in the process that serves everybody.

The sandbox of jinja2 keeps a template away from Python's insides. Here its work and its memory are bounded as well: loops and
macros are counted, and whatever could make a large text out of small ones is measured before it is made.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.compiler import generate
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 1 << 23
"""Of a prompt, and of any text on the way to it: more than the longest contexts hold."""

MAX_ITEMS = 1 << 17
"""Of a list that a template makes."""

MAX_WIDTH = 100_000
"""To which a text may be padded, or a list cut; as many as jinja2's own limit for ranges."""

MAX_INDENT = 64
MAX_BITS = 1 << 14
"""Of a whole number."""

MAX_ROUNDS = 2_000_000
"""Rounds of loops and calls of macros in one rendering. Templates make a few for each message and tool."""

MAX_CPU_S = 20.0
"""Of the thread that renders."""

_ROUNDS_BETWEEN_CLOCKS = 256
_CHARACTERS_A_ROUND = 1024
_ITEMS_A_ROUND = 16
"""Making texts and lists counts as rounds too, so that what a template keeps is bounded as well."""

_WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs"])
"""Methods of texts with an argument that says how long the result gets."""

_OPEN_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")
_WIDTH = re.compile(r"[%:].?[-+ #<>=^,_]*(\d*)\.?(\d*)")
"""Width and precision behind % or within braces."""


class LimitExceeded(jinja2.TemplateRuntimeError):
    """The template did more than any honest one does."""


class _Account:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self.next_clock = _ROUNDS_BETWEEN_CLOCKS
        self.deadline = time.thread_time() + MAX_CPU_S

    def spend(self, rounds: int) -> None:
        self.num_rounds += rounds
        if self.num_rounds > MAX_ROUNDS:
            raise LimitExceeded(f"it made more than {MAX_ROUNDS} rounds of loops and macros")
        if self.num_rounds >= self.next_clock:
            self.next_clock = self.num_rounds + _ROUNDS_BETWEEN_CLOCKS
            if time.thread_time() > self.deadline:
                raise LimitExceeded(f"it took longer than {MAX_CPU_S:g} s")


_account: ContextVar[_Account] = ContextVar("brigade_template_account")


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The template's text.

    Raises:
        LimitExceeded: a limit above is reached; it has held its thread until then.
    """
    token = _account.set(_Account())
    try:
        pieces, size = [], 0
        for piece in template.generate(variables):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _account.reset(token)


def template_environment() -> jinja2.Environment:
    """With what templates know from transformers: tojson, raise_exception, strftime_now, ``{% generation %}``, loop controls."""
    environment = _BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols], finalize=_written
    )
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _bounded_filter(name, function) for name, function in environment.filters.items()}
    environment.globals.pop("lipsum")
    environment.globals |= {
        "raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace, "dict": _new_dict,
    }  # fmt: skip
    return environment


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        counted = _Counted().visit(source)
        counted.set_environment(self)
        return str(generate(counted, self, name, filename, defer_init=defer_init, optimized=self.optimized))

    def count_round(self) -> str:
        """Called by every round of a loop and every macro, see ``_Counted``."""
        _account.get().spend(1)
        return ""

    def joined(self, *parts: Any) -> str:
        """Instead of the ~ operator."""
        _measure(parts)
        return "".join(map(str, parts))

    def sliced(self, value: Any, *bounds: Any) -> Any:
        """Instead of value[start:stop:step]."""
        part = value[slice(*bounds)]
        if isinstance(part, (str, list, tuple)):
            _check_made(len(part), isinstance(part, str))
        return part

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805 as in jinja2
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            args = _checked_arguments(owner, __obj.__name__, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Counted(NodeTransformer):
    """Puts a call of ``count_round`` at the beginning of whatever may run often, ``joined`` for ~ and ``sliced`` for slices."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 jinja2's name
        return self._with_count(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:  # noqa: N802 jinja2's name
        return self._with_count(node)

    def visit_CallBlock(self, node: jinja2.nodes.CallBlock) -> jinja2.nodes.Node:  # noqa: N802 jinja2's name
        return self._with_count(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802 jinja2's name
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802 jinja2's name
        self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        given = [jinja2.nodes.Const(None, lineno=node.lineno) if bound is None else bound for bound in bounds]
        return _call("sliced", [node.node, *given], node.lineno)

    def _with_count(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("count_round", [], node.lineno), lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def _call(name: str, arguments: list[jinja2.nodes.Expr], line: int) -> jinja2.nodes.Call:
    function = jinja2.nodes.EnvironmentAttribute(name, lineno=line)
    return jinja2.nodes.Call(function, arguments, [], None, None, lineno=line)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant says, for training; here its body is text like any other."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """As transformers has it: names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 so that namespace(self=...) works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r:.80}")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As it stands; jinja's own filter would write <, > and & as escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    _check_size(len(form))
    _check_format(form)
    return datetime.now().strftime(form)


# ---------------------------------------------------------------------------------------------------------- measures


def _check_size(size: int, limit: int = MAX_CHARACTERS, unit: str = "characters") -> None:
    if size > limit:
        raise LimitExceeded(f"it makes more than {limit} {unit}")


def _written(value: Any) -> Any:
    """Called with everything that is put out."""
    if not isinstance(value, str):
        _measure((value,))
    return value


def _measure(values: Iterable[Any], start: int = 0) -> int:
    """At least how many characters it takes to write these. Parts that are there twice count twice."""
    size, open_values = start, [iter(values)]
    account = _account.get(None)
    while open_values:
        for value in open_values[-1]:
            size += 2
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, Mapping):
                open_values.append(iter([*value, *value.values()]))
                break
            elif isinstance(value, (list, tuple, set, frozenset)):
                open_values.append(iter(value))
                break
            _check_size(size)
        else:
            open_values.pop()
    _check_size(size)
    if account is not None:
        account.spend(size // _CHARACTERS_A_ROUND)
    return size


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str):
            _check_format(left)
            _measure((left, right))
        return
    if isinstance(left, int) and isinstance(right, int):
        if operator == "**":
            _check_size(left.bit_length() * max(right, 1), MAX_BITS, "bits of a number")
        elif operator == "*":
            _check_size(left.bit_length() + right.bit_length(), MAX_BITS, "bits of a number")
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(many, (str, list, tuple)):
                is_text = isinstance(many, str)
                _check_made(len(many) * max(times, 0), is_text)
    elif operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        _check_made(len(left) + len(right), isinstance(left, str))


def _check_made(size: int, is_text: bool) -> None:
    _check_size(size, *((MAX_CHARACTERS, "characters") if is_text else (MAX_ITEMS, "items of a list")))
    _account.get().spend(size // (_CHARACTERS_A_ROUND if is_text else _ITEMS_A_ROUND))


def _check_format(form: str) -> None:
    """Widths and precisions within a format; those that are arguments are refused."""
    if _OPEN_WIDTH.search(form):
        raise LimitExceeded(f"it formats with a width that is not fixed: {form!r:.80}")
    numbers = [number for pair in _WIDTH.findall(form) for number in pair if number]
    _check_size(max(map(len, numbers), default=0), 7, "digits of width")
    _check_size(sum(map(int, numbers)))


def _checked_arguments(text: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of a method of a text, before it makes a larger one; an iterator among them becomes a list."""
    values = [*args, *kwargs.values()]
    if method in _WIDTHS:
        widths = [value for value in values if isinstance(value, int)]
        _check_size(max(widths, default=0), MAX_WIDTH, "characters of width")
        _check_size(len(text) * (max(widths, default=8) if method == "expandtabs" else 1))
    elif method in ("format", "format_map"):
        _check_format(text)
        _measure((text, *values))
    elif method == "replace":
        _check_replaced(text, values)
    elif method == "join" and args:
        args = (_check_joined(args[0], text), *args[1:])
    elif method == "translate":
        most = max((len(new) for new in dict(*args).values() if isinstance(new, str)), default=1)
        _check_size(len(text) * most)
    _account.get().spend(len(text) // _CHARACTERS_A_ROUND)
    return args


def _check_replaced(text: str, values: list[Any]) -> None:
    if len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
        _check_size(len(text) + text.count(values[0]) * len(values[1]))


def _check_joined(parts: Any, separator: str) -> list[Any]:
    found = list(parts)
    _measure(found, start=len(found) * len(separator))
    return found


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter, with its value and arguments checked first; jinja2's marks on the function are kept."""
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value = args[position] if len(args) > position else None
        values = [*args[position + 1 :], *kwargs.values()]
        if name == "join":
            separator = next((item for item in values if isinstance(item, str)), "")
            args = (*args[:position], _check_joined(value, separator), *args[position + 1 :])
        elif isinstance(value, range):
            _check_made(len(value), is_text=False)
        elif isinstance(value, (str, Mapping, list, tuple)):
            size = _measure((value,))
            _check_filter(name, value, size, values)
        return function(*args, **kwargs)

    return bounded


def _check_filter(name: str, value: Any, size: int, values: list[Any]) -> None:
    texts = [item for item in values if isinstance(item, str)]
    numbers = [item for item in values if isinstance(item, int)]
    if name == "replace" and isinstance(value, str):
        _check_replaced(value, values)
    elif name == "format":
        _check_format(str(value))
        _measure(values)
    elif name in ("indent", "urlize", "wordwrap", "xmlattr"):
        _check_size(size * max((len(text) for text in texts), default=1))
    if name in ("tojson", "indent"):
        _check_size(max([0, *numbers, *(len(text) for text in texts if name == "tojson")]), MAX_INDENT, "blanks of indentation")
    if name in ("center", "batch", "slice"):
        _check_size(max(numbers, default=0), MAX_WIDTH, "of width")
