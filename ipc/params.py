"""How a client wants its tokens chosen, and when generation ends."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

from ipc.errors import RequestError
from ipc.structured import StructuredOutput

MAX_LOGPROBS = 20
ALL_LOGPROBS = -1
"""As ``logprobs``: those of the whole vocabulary."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOKENS = 1 << 24
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_SEED = (1 << 63) - 1
MAX_TOKEN_ID = (1 << 31) - 1
MAX_CACHE_SALT_CHARS = 256
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 14
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 64
MAX_BAD_WORD_TOKENS = 16
MAX_CHOICES = 64
MAX_PROCESSORS = 4
MAX_PROCESSOR_NAME_CHARS = 256
MAX_PROCESSOR_ARGUMENTS = 8
MAX_ARGUMENT_CHARS = 64

LOGPROBS_MODES = ("raw", "processed")

Scalar = int | float | str | bool


class DrawRules(NamedTuple):
    """The parameters that a model can bring defaults for, without gaps; these are the engine's own defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Per-request sampling and stopping rules; an existing object is a valid one.

    docs/sampling.md says in which order they act. Ties at an edge keep the lower token id. The fields of DrawRules are
    None while unset: then the engine takes the model's default (``ModelInfo.sampling_defaults``), else its own.

    Raises:
        RequestError: naming the field, its value and the rule.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None means up to the model's context limit."""

    temperature: float | None = None
    """Divides the logits; 0 means greedy (argmax). Unset: the model's, else 1."""

    top_k: int | None = None
    """Keep exactly the k most likely tokens; 0 keeps all. Unset: the model's, else 0."""

    top_p: float | None = None
    """Keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1]. Unset: the model's, else 1."""

    seed: int | None = None
    """Same seed, same tokens, whatever runs beside it; None lets the engine draw one (told in the output)."""

    stop: tuple[str, ...] = ()
    """Text at which the answer ends (matched by the text clients; raw clients use stop_token_ids)."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer; such a token is part of token_ids but not of the text."""

    ignore_eos: bool = False
    """Go on after the model's own end tokens."""

    include_stop_str_in_output: bool = False
    """Keep the matched stop string at the end of the text."""

    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    logprobs: int | None = None
    """With each token its log probability and those of this many most likely ones (0 to 20, or -1 for all tokens); None
    for none. ``logprobs_mode`` says of which distribution."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from its second one on; always of the model's raw logits. With several choices they
    come with the first."""

    prefix_caching: bool = True
    """Take what earlier requests computed for the same beginning, and leave the same for later ones. The tokens do not
    depend on it; prompt logprobs are always computed."""

    cache_salt: str | None = None
    """Share computed beginnings only with requests that give the same salt (1 to 256 characters), so that nobody else
    can learn from the time to the first token what was asked before."""

    structured: StructuredOutput | None = None
    """The form that the answer must have, as a StructuredOutput or a map of its fields; None for any text."""

    min_p: float | None = None
    """Keep tokens of at least this share of the most likely one's probability, in [0, 1]; 0 keeps all. Unset: the model's,
    else 0."""

    typical_p: float | None = None
    """Keep the smallest set of tokens of about average surprise whose probability reaches typical_p, in (0, 1]. Unset: the
    model's, else 1."""

    presence_penalty: float = 0.0
    """Taken from the logits of tokens that the answer has, -2 to 2."""

    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the answer has it, -2 to 2."""

    repetition_penalty: float | None = None
    """Divides positive logits of tokens that prompt or answer have, and multiplies their other ones; above 0, up to 10.
    Unset: the model's, else 1."""

    min_tokens: int = 0
    """Tokens that would end the answer can't be among the first so many; nor is a stop string heeded that these complete."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids with what is added to their logits, -100 to 100; a map will do."""

    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that the answer may have; None allows all."""

    bad_words: tuple[str, ...] = ()
    """Words that the answer can't have, also with a space in front (the text clients make ``bad_word_ids`` of them)."""

    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """The same as sequences of 1 to 16 token ids: where all but the last were just generated, the last can't follow."""

    logprobs_mode: str = "raw"
    """"raw": log-softmax of the model's own logits. "processed": of what a token is drawn from, after all of the rules."""

    n: int = 1
    """Answers to this prompt (1 to 64), each with an index and a seed of its own: the given one for index 0, and for others
    one derived from it and the index. They share the KV blocks of the prompt."""

    echo: bool = False
    """The text begins with the prompt's (done by the text clients)."""

    logits_processors: tuple[tuple[str, tuple[tuple[str, Scalar], ...]], ...] = ()
    """Names of processors that the engine was started with, and the arguments for each; a map of maps will do."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in _BOOLEANS:
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "must be true or false")
        self._check_texts()
        self._check_token_ids()
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refused("min_tokens", self.min_tokens, f"must not be above max_tokens={self.max_tokens}")

    def _check_numbers(self) -> None:
        for name, (low, high) in INTEGER_LIMITS.items():
            value = getattr(self, name)
            if value is not None or _DEFAULTS[name] is not None:
                _check_int(name, value, low, high)
        for name, (least, most) in NUMBER_LIMITS.items():
            value = getattr(self, name)
            if value is not None or _DEFAULTS[name] is not None:
                _check_number(name, value, least, most, excludes_least=name in ABOVE_ZERO)

    def _check_texts(self) -> None:
        _freeze_items(self, "stop", str, MAX_STOP_STRINGS)
        for text in self.stop:
            _check_text("stop", text, MAX_STOP_STRING_CHARS)
        _freeze_items(self, "bad_words", str, MAX_BAD_WORDS)
        for word in self.bad_words:
            _check_text("bad_words", word, MAX_BAD_WORD_CHARS)
            if not word.strip():
                raise _refused("bad_words", word, "must be more than blanks")
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt, MAX_CACHE_SALT_CHARS)
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutput.of(self.structured))
        if type(self.logprobs_mode) is not str or self.logprobs_mode not in LOGPROBS_MODES:
            raise _refused("logprobs_mode", self.logprobs_mode, f"must be one of {', '.join(LOGPROBS_MODES)}")

    def _check_token_ids(self) -> None:
        _freeze_items(self, "stop_token_ids", int, MAX_STOP_TOKEN_IDS)
        _check_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _freeze_items(self, "allowed_token_ids", int, MAX_ALLOWED_TOKENS)
            _check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise _refused("allowed_token_ids", [], "must have at least one id; leave it out to allow all")
        object.__setattr__(self, "bad_word_ids", _id_sequences(self.bad_word_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def to_wire(self) -> dict[str, Any]:
        """Only the fields that differ from their defaults: small, and readable in a dump. What is unset stays unset."""
        values = {name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default}
        if self.structured is not None:
            values["structured"] = self.structured.to_wire()
        return values

    @classmethod
    def from_wire(cls, values: Mapping[Any, Any]) -> "SamplingParams":
        """Rebuild from a decoded map; null means unset. Raises RequestError as the constructor does."""
        for name in values:
            if name not in _DEFAULTS:
                raise _refused(str(name)[:64], values[name], "is not a known sampling parameter")
        return cls(**{name: value for name, value in values.items() if value is not None})

    def resolved(self, defaults: DrawRules, **changes: Any) -> "SamplingParams":
        """With these values for what is unset, and with other changes."""
        unset = {name: value for name, value in defaults._asdict().items() if getattr(self, name) is None}
        return replace(self, **unset, **changes)

    def draw_rules(self) -> DrawRules:
        """Those of its own, with the engine's defaults for what is unset."""
        own = {name: getattr(self, name) for name in DrawRules._fields}
        return DrawRules(**{name: value for name, value in own.items() if value is not None})

    def ending_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that end an answer, for a model with these end tokens."""
        return self.stop_token_ids if self.ignore_eos else (*eos_token_ids, *self.stop_token_ids)


def _refused(field: str, value: Any, rule: str, of: str | None = None) -> RequestError:
    return RequestError(f"{of or field}={_shown(value)} {rule}", field=field)


def _shown(value: Any) -> str:
    """At most 80 characters; Python itself refuses to print integers of more than 4300 digits."""
    if type(value) is int and value.bit_length() > 256:
        return f"(an integer of {value.bit_length()} bits)"
    shown = repr(value[:80]) if isinstance(value, (str, bytes)) else repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int:
        raise _refused(field, value, "must be an integer")
    if not low <= value <= high:
        raise _refused(field, value, f"must be between {low} and {high}")


def _check_number(
    field: str, value: Any, low: float, high: float, *, excludes_least: bool = False, of: str | None = None
) -> None:
    """``of``: which entry of the field it is."""
    if type(value) not in (int, float):
        raise _refused(field, value, "must be a number", of)
    # NaN is in no range.
    if excludes_least and not low < value <= high:
        raise _refused(field, value, f"must be above {low:g} and at most {high:g}", of)
    if not low <= value <= high:
        raise _refused(field, value, f"must be between {low:g} and {high:g}", of)


def _check_text(field: str, value: Any, most: int) -> None:
    if type(value) is not str:
        raise _refused(field, value, "must be text")
    if not 1 <= len(value) <= most:
        raise _refused(field, value, f"must have 1 to {most} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _refused(field, value, "must be valid Unicode text, without lone surrogates")


def _check_ids(field: str, token_ids: tuple[int, ...]) -> None:
    for token_id in token_ids:
        _check_int(field, token_id, 0, MAX_TOKEN_ID)


def _freeze_items(params: SamplingParams, field: str, kind: type, most: int) -> None:
    value = getattr(params, field)
    items = (value,) if type(value) is kind else value
    if not isinstance(items, (list, tuple)) or any(type(item) is not kind for item in items):
        noun = _NOUNS[kind]
        raise _refused(field, value, f"must be {'an' if kind is int else 'a'} {noun} or a list of {noun}s")
    _check_length(field, items, most)
    object.__setattr__(params, field, tuple(items))


_NOUNS = {str: "text", int: "integer"}


def _check_length(field: str, items: Any, most: int) -> None:
    if len(items) > most:
        raise RequestError(f"{field} has {len(items)} entries; at most {most} are allowed", field=field)


def _pairs(field: str, value: Any, most: int, rule: str) -> list[tuple[Any, Any]]:
    """Of a map, or of the list of pairs that a map becomes."""
    items = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(items, (list, tuple)) or any(not isinstance(i, (list, tuple)) or len(i) != 2 for i in items):
        raise _refused(field, value, rule)
    _check_length(field, items, most)
    return [(key, content) for key, content in items]


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    field = "logit_bias"
    pairs = _pairs(field, value, MAX_BIASED_TOKENS, "must map token ids to numbers")
    for token_id, bias in pairs:
        _check_int(field, token_id, 0, MAX_TOKEN_ID)
        _check_number(field, bias, -MAX_BIAS, MAX_BIAS, of=f"{field}[{token_id}]")
    _check_unique(field, [token_id for token_id, _ in pairs])
    return tuple((token_id, float(bias)) for token_id, bias in pairs)


def _id_sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    field, rule = "bad_word_ids", f"must be a list of lists of 1 to {MAX_BAD_WORD_TOKENS} token ids"
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, (list, tuple)) for word in value):
        raise _refused(field, value, rule)
    # Each word may begin with a space or without.
    _check_length(field, value, 2 * MAX_BAD_WORDS)
    for word in value:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise _refused(field, word, rule)
        _check_ids(field, tuple(word))
    return tuple(map(tuple, value))


def _processors(value: Any) -> tuple[tuple[str, tuple[tuple[str, Scalar], ...]], ...]:
    field, rule = "logits_processors", "must map names of processors to maps of arguments"
    pairs = _pairs(field, value, MAX_PROCESSORS, rule)
    frozen = []
    for name, arguments in pairs:
        _check_text(field, name, MAX_PROCESSOR_NAME_CHARS)
        found = _pairs(field, arguments, MAX_PROCESSOR_ARGUMENTS, rule)
        for key, argument in found:
            _check_text(field, key, MAX_ARGUMENT_CHARS)
            _check_argument(field, argument)
        _check_unique(field, [key for key, _ in found])
        frozen.append((name, tuple(found)))
    _check_unique(field, [name for name, _ in frozen])
    return tuple(frozen)


def _check_argument(field: str, value: Any) -> None:
    if type(value) is str and value:
        _check_text(field, value, MAX_ARGUMENT_CHARS)
    elif type(value) not in (int, float, str, bool):
        raise _refused(field, value, "must be a number, a boolean or a text")
    elif type(value) is int:
        _check_int(field, value, -(1 << 63), (1 << 63) - 1)


def _check_unique(field: str, keys: list[Any]) -> None:
    if len(set(keys)) != len(keys):
        twice = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise _refused(field, twice, "is there twice")


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}

_BOOLEANS = tuple(name for name, default in _DEFAULTS.items() if type(default) is bool)

INTEGER_LIMITS = {
    "max_tokens": (1, MAX_TOKENS),
    "top_k": (0, MAX_TOKEN_ID),
    "seed": (0, MAX_SEED),
    "logprobs": (ALL_LOGPROBS, MAX_LOGPROBS),
    "prompt_logprobs": (ALL_LOGPROBS, MAX_LOGPROBS),
    "min_tokens": (0, MAX_TOKENS),
    "n": (1, MAX_CHOICES),
}
"""Least and most; None is no value only where it is the default."""

ABOVE_ZERO = ("top_p", "typical_p", "repetition_penalty")
"""Of these the least value itself is no value."""

NUMBER_LIMITS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (0.0, MAX_REPETITION_PENALTY),
}
