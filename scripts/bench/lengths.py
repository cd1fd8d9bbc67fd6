"""How long is the next prompt, or the next answer? A fixed number of tokens, or one drawn from a range."""

import math
import random
from dataclasses import dataclass

import click

from ipc.errors import ConfigError

MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts from ``low`` to ``high``, both included."""

    low: int
    high: int
    is_log: bool = False
    """Every doubling is as likely as the next one; else every count is as likely as another."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= MAX_TOKENS:
            raise ConfigError("lengths", f"{self} must be between 1 and {MAX_TOKENS}, the lower bound first")

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From ``N``, ``LOW:HIGH`` or ``log:LOW:HIGH``. Raises ConfigError."""
        words = text.split(":")
        is_log = words[0] == "log" and len(words) == 3
        numbers = words[1:] if is_log else words
        if len(numbers) > 2 or not all(word.isascii() and word.isdigit() and len(word) < 9 for word in numbers):
            raise ConfigError("lengths", f"{text!r:.80} must be N, LOW:HIGH or log:LOW:HIGH, in tokens")
        return cls(low=int(numbers[0]), high=int(numbers[-1]), is_log=is_log)

    def draw(self, source: random.Random) -> int:
        """The next one. A fixed length draws nothing."""
        if self.low == self.high:
            return self.low
        if self.is_log:
            return min(self.high, int(math.exp(source.uniform(math.log(self.low), math.log(self.high + 1)))))
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        span = str(self.low) if self.low == self.high else f"{self.low}:{self.high}"
        return f"log:{span}" if self.is_log else span


class LengthsType(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """Lengths on a command line."""

    name = "N|LOW:HIGH|log:LOW:HIGH"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        """Fails with a usage error."""
        if isinstance(value, Lengths):
            return value
        try:
            return Lengths.parse(str(value))
        except ConfigError as error:
            self.fail(error.message, param, ctx)
