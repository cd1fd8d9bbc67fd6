"""How much memory may this rank still use, and what does it say when there is too little?"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ipc.errors import ConfigError

PAGE_BYTES = resource.getpagesize()


def free_memory(device: torch.device) -> int:
    """Bytes free on the device now, whoever else may want them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def free_host_memory(root: Path = Path("/")) -> int:
    """The least of what the machine, the cgroups above this process and its address space limit leave."""
    limits = [_available(root), *_cgroup_headrooms(root)]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - _statm(root)[0] * PAGE_BYTES)
    return max(0, min(limits))


def resident_bytes(root: Path = Path("/")) -> int:
    """Physical memory of this process."""
    return _statm(root)[1] * PAGE_BYTES


@contextmanager
def memory_for(field: str, what: str, remedy: str) -> Iterator[None]:
    """Turn a failed allocation into a ConfigError."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(field, f"no memory for {what} ({text}); {remedy}") from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether that was why an allocation failed; torch has no type for it on a CPU."""
    first_line = (str(error).splitlines() or [""])[0]
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in first_line


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; this kernel is too old")


def _statm(root: Path) -> list[int]:
    with open(root / "proc/self/statm", encoding="ascii") as file:
        return [int(word) for word in file.read().split()]


def _cgroup_headrooms(root: Path) -> list[int]:
    """One entry for every cgroup from this process's own up to the root that sets a limit."""
    headrooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        own = Path(path.lstrip("/"))
        for place in (own, *own.parents):
            values = (_number(base / place / limit), _number(base / place / usage))
            if values[0] is not None and values[1] is not None:
                # Page cache that nobody uses counts as usage, and goes when memory is asked for.
                headrooms.append(values[0] - values[1] + _stat(base / place / "memory.stat", cache))
    return headrooms


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _number(path: Path) -> int | None:
    """None for a missing file and for "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _stat(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
