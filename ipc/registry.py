"""What makes a class a message, and which messages are there?"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

MESSAGE_TYPES: dict[int, type] = {}
"""By tag; filled when ``messages.py`` is imported."""

M = TypeVar("M")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def message(tag: int) -> Callable[[type[M]], type[M]]:
    """Make a class a frozen, slotted, keyword-only dataclass that travels under ``tag``."""

    def register(cls: type[M]) -> type[M]:
        if tag in MESSAGE_TYPES:
            raise ValueError(f"tag {tag} belongs to {MESSAGE_TYPES[tag].__name__}")
        made = part(cls)
        MESSAGE_TYPES[tag] = made
        return made

    return register


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def part(cls: type[M]) -> type[M]:
    """The same for a class that travels only inside a message."""
    return dataclass(frozen=True, slots=True, kw_only=True, eq=False)(cls)
