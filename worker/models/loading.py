"""How do a checkpoint's tensors get into a stage?"""

from collections.abc import Callable
from typing import Protocol

from ipc.errors import ConfigError
from worker.layers.weight_slot import WeightSlot
from worker.weights import Checkpoint

FIELD = "MODEL"
_MOST_NAMES = 5


class Loadable(Protocol):
    """What has weights: a stage of a model, or an encoder. See StageModel for what each of these says."""

    def weight_slots(self) -> dict[str, WeightSlot]: ...

    def owns(self, name: str) -> bool: ...

    def ignores(self, name: str) -> bool: ...

    def prepare(self) -> None: ...

    def weight_bytes(self) -> int: ...


def load_weights(stage: Loadable, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> int:
    """Fill the stage from the checkpoint and prepare it; returns the bytes that its weights take.

    ``progress(done, total)`` is called after each tensor with counts of tensors.

    Raises:
        ConfigError: for tensors that are missing, of another shape, or left over in this stage's share, before
            anything was read; or for a file that can't be read.
    """
    sources = check_weights(stage, checkpoint)
    slots = stage.weight_slots()
    for done, (name, slot) in enumerate(slots.items(), start=1):
        slot.load(checkpoint.load(sources[name]))
        progress(done, len(slots))
    stage.prepare()
    return stage.weight_bytes()


def check_weights(stage: Loadable, checkpoint: Checkpoint) -> dict[str, str]:
    """What each of the stage's tensors is called in the checkpoint; nothing is read.

    Works on a stage built on the device ``meta`` too, so that a configuration of another model is found before its
    weights have memory.

    Raises:
        ConfigError: for tensors that are missing, of another shape, or left over in this stage's share.
    """
    slots = stage.weight_slots()
    names = checkpoint.names()
    sources = {name: _source(name, slot, names) for name, slot in slots.items()}
    _check_names(stage, checkpoint, sources, names)
    for name, slot in slots.items():
        _check_shape(checkpoint, sources[name], slot)
    return sources


def _source(name: str, slot: WeightSlot, names: set[str]) -> str:
    """Under which name the checkpoint holds what this slot wants."""
    return next((candidate for candidate in (name, *slot.aliases) if candidate in names), name)


def _check_names(stage: Loadable, checkpoint: Checkpoint, sources: dict[str, str], names: set[str]) -> None:
    missing = [name for name in sources.values() if name not in names]
    if missing:
        raise ConfigError(FIELD, f"{checkpoint.where('')} lacks {_shown(missing)}, which the configuration asks for")
    used = set(sources.values())
    left_over = sorted(name for name in names - used if stage.owns(name) and not stage.ignores(name))
    if left_over:
        raise ConfigError(
            FIELD, f"{checkpoint.where(left_over[0])} holds {_shown(left_over)}, for which the configuration has no use"
        )


def _check_shape(checkpoint: Checkpoint, name: str, slot: WeightSlot) -> None:
    found = checkpoint.describe(name)
    if found != slot.shape:
        raise ConfigError(
            FIELD,
            f"tensor {name} in {checkpoint.where(name)} has shape {list(found)}, "
            f"the configuration asks for {list(slot.shape)}",
        )


def _shown(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return f"tensor{'s' * (len(names) > 1)} {', '.join(names[:_MOST_NAMES])}" + (
        f" and {more} more" if more > 0 else ""
    )
