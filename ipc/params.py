"""How a client wants its tokens chosen, and when generation ends."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ipc.errors import RequestError
from ipc.structured import StructuredOutput

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_TOKENS = 1 << 24
MAX_TEMPERATURE = 100.0
MAX_SEED = (1 << 63) - 1
MAX_TOKEN_ID = (1 << 31) - 1
MAX_CACHE_SALT_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Per-request sampling and stopping rules; an existing object is a valid one.

    Filters act in this order: temperature, top_k, top_p, then one draw. Ties at an edge keep the lower token id.

    Raises:
        RequestError: naming the field, its value and the rule.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None means up to the model's context limit."""

    temperature: float = 1.0
    """Divides the logits; 0 means greedy (argmax)."""

    top_k: int = 0
    """Keep exactly the k most likely tokens; 0 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p, in (0, 1]."""

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
    """With each token its log probability and those of this many most likely ones (0 to 20); None for none.

    Values are log-softmax of the model's raw logits, before temperature and filters.
    """

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from its second one on."""

    prefix_caching: bool = True
    """Take what earlier requests computed for the same beginning, and leave the same for later ones. The tokens do not
    depend on it; prompt logprobs are always computed."""

    cache_salt: str | None = None
    """Share computed beginnings only with requests that give the same salt (1 to 256 characters), so that nobody else
    can learn from the time to the first token what was asked before."""

    structured: StructuredOutput | None = None
    """The form that the answer must have, as a StructuredOutput or a map of its fields; None for any text."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, 0, MAX_TOKEN_ID)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p <= 0:
            raise _refused("top_p", self.top_p, "must be above 0 and at most 1")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _freeze_items(self, "stop", str, MAX_STOP_STRINGS)
        for text in self.stop:
            _check_text("stop", text, MAX_STOP_STRING_CHARS)
        _freeze_items(self, "stop_token_ids", int, MAX_STOP_TOKEN_IDS)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, MAX_TOKEN_ID)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "prefix_caching"):
            if type(getattr(self, name)) is not bool:
                raise _refused(name, getattr(self, name), "must be true or false")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt, MAX_CACHE_SALT_CHARS)
        if self.structured is not None:
            object.__setattr__(self, "structured", StructuredOutput.of(self.structured))

    def to_wire(self) -> dict[str, Any]:
        """Only the fields that differ from their defaults: small, and readable in a dump."""
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


def _refused(field: str, value: Any, rule: str) -> RequestError:
    return RequestError(f"{field}={_shown(value)} {rule}", field=field)


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


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float):
        raise _refused(field, value, "must be a number")
    if not low <= value <= high:  # NaN is in no range
        raise _refused(field, value, f"must be between {low:g} and {high:g}")


def _check_text(field: str, value: Any, most: int) -> None:
    if type(value) is not str:
        raise _refused(field, value, "must be text")
    if not 1 <= len(value) <= most:
        raise _refused(field, value, f"must have 1 to {most} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _refused(field, value, "must be valid Unicode text, without lone surrogates")


def _freeze_items(params: SamplingParams, field: str, kind: type, most: int) -> None:
    value = getattr(params, field)
    items = (value,) if type(value) is kind else value
    if not isinstance(items, (list, tuple)) or any(type(item) is not kind for item in items):
        raise _refused(field, value, f"must be a list of {kind.__name__} values")
    if len(items) > most:
        raise RequestError(f"{field} has {len(items)} entries; at most {most} are allowed", field=field)
    object.__setattr__(params, field, tuple(items))


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams) if f.default is not MISSING}
