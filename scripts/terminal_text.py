"""What may be written to a terminal: colour where it is wanted, and nothing that would steer the terminal."""

import os
import re
from typing import TextIO

import click

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and newline: a carriage return can hide what stands before it."""


def printable(text: str) -> str:
    """The same without control characters: a model's answer, or another client's name, is a stranger's text."""
    return _CONTROL.sub("\ufffd", text)


def wants_colour(stream: TextIO) -> bool:
    """A terminal, and nobody said NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    """Faint, where colour is wanted."""
    return click.style(text, dim=True) if wants_colour(stream) else text
