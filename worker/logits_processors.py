"""What may change logits beside our own rules: functions of a user, named ``module:attribute``, loaded on the last stage.

A processor is called once a step, for the rows whose requests name it::

    def process(logits, rows):
        for i, row in enumerate(rows):
            logits[i, row.token_ids[-1]] -= row.arguments.get("strength", 1.0)

It changes ``logits`` in place. What it does to a row may depend on nothing but that row's logits and description: it keeps
nothing from one call for the next. So the same tokens come out in any batch, after preemption, and after a restart.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ipc.errors import ConfigError
from ipc.params import Scalar

_FLAG = "--logits-processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRow:
    """One sequence that is about to get a token."""

    request_id: str
    token_ids: NDArray[np.int32]
    """Prompt and answer so far; not to be written to."""

    num_prompt_tokens: int
    arguments: Mapping[str, Scalar]
    """What the request gave for this processor."""


LogitsProcessor = Callable[[Tensor, Sequence[ProcessedRow]], None]
"""From [N, V] float32 logits, changed in place, and N descriptions."""


def load_processors(names: Sequence[str]) -> dict[str, LogitsProcessor]:
    """The functions of these names.

    Raises:
        ConfigError: a name is not of this form, or nothing that can be called has it.
    """
    return {name: _load(name) for name in names}


def _load(name: str) -> LogitsProcessor:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(_FLAG, f"{name!r} must have the form module:attribute")
    try:
        found = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 a user's module may raise anything while it is imported
        raise ConfigError(_FLAG, f"{name!r}: {module_name} can't be imported ({type(error).__name__}: {error})") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigError(_FLAG, f"{name!r}: {module_name} has no {attribute}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(_FLAG, f"{name!r} is a {type(found).__name__}, which can't be called")
    function: LogitsProcessor = found
    return function
