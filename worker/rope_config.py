"""How do positions turn queries and keys, and how does a description say it? Without torch."""

import math
from dataclasses import dataclass
from typing import Any

from ipc.errors import ConfigError
from worker.config_fields import FIELD, Fields, refused, shown

ROPE_KINDS = ("default", "linear", "llama3", "factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn queries and keys."""

    theta: float
    """Base of the wavelengths."""

    kind: str = "default"
    """``default``; ``linear`` (all frequencies divided by ``factor``); ``llama3`` (low frequencies divided by
    ``factor``, with a smooth passage); ``factors`` (each frequency divided by its entry of ``factors``)."""

    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0

    original_max_position: int = 0
    """Context length before it was stretched; for ``llama3``."""

    factors: tuple[float, ...] = ()
    """One divisor for each of the D / 2 frequencies."""

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise refused("rope type", self.kind, f"must be one of {', '.join(ROPE_KINDS)}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise refused("rope_theta", self.theta, "must be above 0")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise refused("rope factor", self.factor, "must be above 0")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise refused(
                "high_freq_factor", self.high_freq_factor, f"must be above low_freq_factor={self.low_freq_factor}"
            )
        if self.kind == "llama3" and self.original_max_position < 1:
            raise refused("original_max_position_embeddings", self.original_max_position, "must be at least 1")
        if any(not (math.isfinite(factor) and factor > 0) for factor in self.factors):
            raise refused("rope factors", self.factors, "must all be above 0")


def read_rope(fields: Fields) -> RopeConfig:
    """Either spelling: ``rope_parameters``, or ``rope_theta`` beside ``rope_scaling`` (null for none)."""
    values = fields.get("rope_parameters", dict, {}) | fields.get("rope_scaling", dict, {})
    return rope_of(fields, values, fields.get("rope_theta", float, 10000.0))


def rope_of(fields: Fields, values: dict[str, Any], theta: float) -> RopeConfig:
    """What ``values``, a part of ``fields``, say; ``theta`` unless they have their own."""
    max_position = fields.get("max_position_embeddings", int)
    rope = Fields(values, f"{fields.where}: rope scaling")
    theta = rope.get("rope_theta", float, theta)
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope.must_be("partial_rotary_factor", 1.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=rope.get("factor", float))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=rope.get("factor", float),
            low_freq_factor=rope.get("low_freq_factor", float),
            high_freq_factor=rope.get("high_freq_factor", float),
            original_max_position=rope.get("original_max_position_embeddings", int, max_position),
        )
    raise ConfigError(FIELD, f"{rope.where}: type {shown(kind)} is not supported; default, linear and llama3 are")
