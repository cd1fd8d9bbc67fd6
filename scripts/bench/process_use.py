"""What does a process hold: memory of its own, open files, sockets? Read from /proc, at little cost."""

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Of one process at one moment."""

    anonymous_bytes: int
    """Memory that no file backs, swapped out or not: weights that are mapped don't count, and no page cache."""
    num_files: int
    """Open descriptors that are no sockets."""
    num_sockets: int


def read_use(pid: int) -> Use | None:
    """None when the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        kinds = [_target(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return None
    sizes = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE)
    if not sizes:
        return None
    num_sockets = sum(kind.startswith("socket:") for kind in kinds)
    return Use(anonymous_bytes=sum(map(int, sizes)) << 10, num_files=sum(map(bool, kinds)) - num_sockets, num_sockets=num_sockets)


def _target(link: str) -> str:
    """Empty for a descriptor that was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return ""
