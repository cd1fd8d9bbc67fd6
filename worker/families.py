"""What does each model family say in its config.json in a way of its own? Without torch.

Where a field is absent its family's default holds, as checkpoints leave out what their first reader took for granted.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ipc.errors import ConfigError
from worker.config_fields import FIELD, Fields, shown
from worker.rope_config import RopeConfig, read_rope, rope_of

MOST_LAYERS = 1 << 12

FULL, WINDOWED = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFields:
    """Fields of ModelConfig; see there."""

    rope: RopeConfig
    head_size: int | None = None
    """None: the width divided by the heads."""

    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    query_scalar: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    is_embedding_scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    name: str
    """Key of the table of model classes in worker/models."""

    read: Callable[[Fields], FamilyFields]


def _llama(fields: Fields) -> FamilyFields:
    fields.must_be("hidden_act", "silu")
    return FamilyFields(
        rope=read_rope(fields),
        head_size=_head_size(fields),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        attention_bias=fields.get("attention_bias", bool, False),
        mlp_bias=fields.get("mlp_bias", bool, False),
    )


def _mistral(fields: Fields) -> FamilyFields:
    """One window for all layers; a list of kinds beside it may not say something else."""
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False)
    window = fields.nullable("sliding_window", int, 4096)
    kinds = _layer_kinds(fields)
    expected = FULL if window is None else WINDOWED
    if kinds is not None and set(kinds) != {expected}:
        raise ConfigError(
            FIELD,
            f"{fields.where}: layer_types={shown(kinds)} contradicts sliding_window={shown(window)}; a Mistral's layers are "
            f"all alike, so all must be {expected!r}",
        )
    return FamilyFields(
        rope=read_rope(fields),
        head_size=_head_size(fields),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        layer_windows=_windows(fields, window, lambda layer: True),
    )


def _qwen2(fields: Fields) -> FamilyFields:
    fields.must_be("hidden_act", "silu")
    return FamilyFields(
        rope=read_rope(fields),
        head_size=_head_size(fields),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        layer_windows=_late_windows(fields),
    )


def _qwen3(fields: Fields) -> FamilyFields:
    fields.must_be("hidden_act", "silu")
    return FamilyFields(
        rope=read_rope(fields),
        head_size=_head_size(fields) or 128,
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        attention_bias=fields.get("attention_bias", bool, False),
        layer_windows=_late_windows(fields),
    )


def _gemma2(fields: Fields) -> FamilyFields:
    _check_gemma(fields)
    return FamilyFields(
        rope=read_rope(fields),
        head_size=_head_size(fields) or 256,
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, True),
        attention_bias=fields.get("attention_bias", bool, False),
        layer_windows=_windows(fields, fields.nullable("sliding_window", int, 4096), lambda layer: layer % 2 == 0),
        query_scalar=fields.get("query_pre_attn_scalar", float, 256.0),
        attention_soft_cap=fields.nullable("attn_logit_softcapping", float, 50.0),
        logit_soft_cap=fields.nullable("final_logit_softcapping", float, 30.0),
        is_embedding_scaled=True,
    )


def _gemma3(fields: Fields) -> FamilyFields:
    _check_gemma(fields)
    fields.must_be("attn_logit_softcapping", None)
    pattern = fields.get("sliding_window_pattern", int, 6)
    if pattern < 1:
        raise ConfigError(FIELD, f"{fields.where}: sliding_window_pattern={shown(pattern)} must be at least 1")
    rope, local_rope = _gemma3_ropes(fields)
    return FamilyFields(
        rope=rope,
        local_rope=local_rope,
        head_size=_head_size(fields) or 256,
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, True),
        attention_bias=fields.get("attention_bias", bool, False),
        layer_windows=_windows(
            fields, fields.nullable("sliding_window", int, 4096), lambda layer: (layer + 1) % pattern != 0
        ),
        query_scalar=fields.get("query_pre_attn_scalar", float, 256.0),
        logit_soft_cap=fields.nullable("final_logit_softcapping", float, None),
        is_embedding_scaled=True,
    )


FAMILIES = {
    "LlamaForCausalLM": Family(name="llama", read=_llama),
    "MistralForCausalLM": Family(name="mistral", read=_mistral),
    "Qwen2ForCausalLM": Family(name="qwen2", read=_qwen2),
    "Qwen3ForCausalLM": Family(name="qwen3", read=_qwen3),
    "Gemma2ForCausalLM": Family(name="gemma2", read=_gemma2),
    "Gemma3ForCausalLM": Family(name="gemma3", read=_gemma3),
}
"""By class name in config.json."""


def family_of(fields: Fields) -> Family:
    """Raises ConfigError for an architecture that is not known."""
    names = fields.get("architectures", list, [])
    if any(type(name) is not str for name in names):
        raise ConfigError(FIELD, f"{fields.where}: architectures={shown(names)} must be a list of texts")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    model_type = shown(fields.values.get("model_type"))
    found = ", ".join(map(shown, names))[:200] or f"model_type {model_type} without 'architectures'"
    raise ConfigError(FIELD, f"{fields.where}: unknown architecture {found}; known are {', '.join(sorted(FAMILIES))}")


def _head_size(fields: Fields) -> int | None:
    return fields.get("head_dim", int, 0) or None


def _check_gemma(fields: Fields) -> None:
    """The activation goes by ``hidden_activation``; old files have a ``hidden_act`` beside it that nobody follows."""
    fields.must_be("hidden_activation", "gelu_pytorch_tanh")
    fields.must_be("use_bidirectional_attention", False)


def _gemma3_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """Of full and of windowed layers, in either spelling."""
    parameters = fields.get("rope_parameters", dict, {})
    for kind in parameters:
        if kind not in (FULL, WINDOWED):
            raise ConfigError(
                FIELD, f"{fields.where}: rope_parameters has {shown(kind)}; this family's has {FULL!r} and {WINDOWED!r}"
            )
    of_kind = Fields(parameters, f"{fields.where}: rope_parameters")
    full = of_kind.get(FULL, dict, {}) | fields.get("rope_scaling", dict, {})
    local = of_kind.get(WINDOWED, dict, {})
    theta = fields.get("rope_theta", float, 1_000_000.0)
    local_theta = fields.get("rope_local_base_freq", float, 10_000.0)
    return rope_of(fields, full, theta), rope_of(fields, local, local_theta)


# ------------------------------------------------------------------------------------------ windows


def _late_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's: only if it says so, in layers from ``max_window_layers`` on."""
    window = fields.nullable("sliding_window", int, 4096) if fields.get("use_sliding_window", bool, False) else None
    first = fields.get("max_window_layers", int, 28)
    return _windows(fields, window, lambda layer: window is not None and layer >= first)


def _windows(
    fields: Fields, window: int | None, is_windowed: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer: by ``layer_types`` if there is one, else by the family's rule.

    A window that no context fills is none. Empty for a number of layers that is refused elsewhere.
    """
    num_layers = fields.get("num_hidden_layers", int)
    if not 1 <= num_layers <= MOST_LAYERS:
        return ()
    if window is not None and window < 1:
        raise ConfigError(FIELD, f"{fields.where}: sliding_window={shown(window)} must be at least 1, or null")
    kinds = _layer_kinds(fields)
    windowed = [is_windowed(layer) if kinds is None else kinds[layer] == WINDOWED for layer in range(num_layers)]
    if kinds is not None and any(windowed) and window is None:
        raise ConfigError(
            FIELD,
            f"{fields.where}: layer_types has {WINDOWED!r}, but there is no window: sliding_window="
            f"{shown(fields.values.get('sliding_window'))}, use_sliding_window={shown(fields.values.get('use_sliding_window'))}",
        )
    if window is not None and window >= fields.get("max_position_embeddings", int):
        window = None
    return tuple(window if has_window else None for has_window in windowed)


def _layer_kinds(fields: Fields) -> list[str] | None:
    """``layer_types``, which counts for more than a window that merely stands there; None when absent."""
    if fields.values.get("layer_types") is None:
        return None
    kinds: list[str] = fields.get("layer_types", list)
    num_layers = fields.get("num_hidden_layers", int)
    if len(kinds) != num_layers:
        raise ConfigError(
            FIELD, f"{fields.where}: layer_types has {len(kinds)} entries, must be one for each of {num_layers} layers"
        )
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise ConfigError(FIELD, f"{fields.where}: layer_types has {shown(kind)}, only {FULL!r} and {WINDOWED!r} are known")
    return kinds
