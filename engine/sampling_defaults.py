"""What do requests get that leave a sampling parameter unset? What the model's generation_config says, else the engine's own."""

import json
import logging
from dataclasses import dataclass
from typing import Any

from ipc.errors import RequestError
from ipc.params import DrawRules, SamplingParams

logger = logging.getLogger(__name__)

FILE = "generation_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The defaults of one engine, and where they come from."""

    rules: DrawRules
    origin: str
    """One line for the log."""
    warnings: tuple[str, ...] = ()
    """A line for each value that can't be a default: field, value and rule."""

    def log(self) -> None:
        for warning in self.warnings:
            logger.warning("%s", warning)
        logger.info("%s", self.origin)


def sampling_defaults(generation_config: bytes, mode: str = "auto") -> SamplingDefaults:
    """The fields of DrawRules that a generation_config has; ``do_sample: false`` in it is a temperature of 0.

    That is only heeded where it is written: every generation_config without it would be greedy by transformers' own default,
    which its authors mostly did not mean. A value that breaks a rule is left out, with a warning. ``max_new_tokens`` is no
    default here: it would cut answers that nobody asked to be short.
    """
    if mode == "none":
        return SamplingDefaults(rules=DrawRules(), origin=f"sampling defaults: none from {FILE} (--generation-config none)")
    config = json.loads(generation_config)
    if not isinstance(config, dict):
        config = {}
    found: dict[str, Any] = {}
    warnings = []
    for name in DrawRules._fields:
        if (value := config.get(name)) is None:
            continue
        try:
            found[name] = getattr(SamplingParams(**{name: value}), name)
        except RequestError as error:
            warnings.append(f"{FILE}: {error.reason}; it is not taken as a default")
    if (does_sample := config.get("do_sample")) is False:
        found["temperature"] = 0.0
    elif does_sample is not None and does_sample is not True:
        warnings.append(f"{FILE}: do_sample={does_sample!r:.80} must be true or false; it is not taken as a default")
    return SamplingDefaults(rules=DrawRules(**found), origin=_origin(found, does_sample is False), warnings=tuple(warnings))


def _origin(found: dict[str, Any], is_greedy: bool) -> str:
    if not found:
        return f"sampling defaults: none from {FILE}"
    shown = " ".join(f"{name}={found[name]:g}" for name in DrawRules._fields if name in found)
    because = " (do_sample is false)" if is_greedy else ""
    return f"sampling defaults from {FILE}: {shown}{because}; a request's own values win"
