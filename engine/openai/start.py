"""What the core tells its child, the HTTP server."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from engine.openai.settings import HttpSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Travels through the child's standard input, since it has secrets."""

    settings: HttpSettings
    connect: str
    listener: int
    """A descriptor that the child inherits."""
    drain_timeout_s: float
    log_level: str
    parent_pid: int

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "Start":
        """The inverse."""
        values: dict[str, Any] = json.loads(data)
        return cls(**values | {"settings": HttpSettings(**values["settings"])})
