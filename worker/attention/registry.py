"""Which attention backend serves this model on this device? Ours and those of installed packages, by name."""

import logging
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract

import torch

from ipc.errors import ConfigError
from worker.attention.backend import AttentionBackend, AttentionNeeds, Capabilities

FIELD = "--attention-backend"

ENTRY_POINT_GROUP = "brigade.attention_backends"
"""A package offers a backend as an entry point of this group: its name, and the class it is made by."""

logger = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {}


def register(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Class decorator."""
    if backend.name in _BACKENDS:
        raise ValueError(f"attention backend {backend.name!r} is registered already")
    _BACKENDS[backend.name] = backend
    return backend


def backend_names() -> list[str]:
    """Of all that are known here, those of other packages last; none of these is loaded."""
    return [*_BACKENDS, *_offered()]


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """The backend of that name, or for ``auto`` the best that can serve this model here.

    Raises:
        ConfigError: an unknown name, or nothing fits; it says what each lacks.
    """
    if name == "auto":
        return _best(needs)
    if name not in backend_names():
        raise ConfigError(FIELD, f"{name!r:.80} is unknown; give auto or one of {', '.join(backend_names())}")
    backend = _BACKENDS[name] if name in _BACKENDS else _load(_offered()[name])
    lacks = obstacles(backend, needs)
    if lacks:
        raise ConfigError(FIELD, f"{name} cannot be used, it lacks {', '.join(lacks)}")
    made = _made(backend)
    logger.info("attention backend %s (asked for)", name)
    return made


def _best(needs: AttentionNeeds) -> AttentionBackend:
    known = [*_BACKENDS.values(), *_loadable()]
    lacking: dict[str, list[str]] = {}
    for backend in sorted(known, key=lambda backend: -backend.preference):
        lacks = obstacles(backend, needs)
        if not lacks:
            try:
                made = _made(backend)
            except ConfigError as error:
                logger.warning("%s", error)
                lacking[backend.name] = ["a constructor that works"]
                continue
            others = "".join(f"; {other} lacks {', '.join(what)}" for other, what in lacking.items())
            logger.info("attention backend %s (best that fits%s)", backend.name, others)
            return made
        lacking[backend.name] = lacks
    width = max(map(len, lacking))
    table = "".join(f"\n  {other:<{width}}  lacks {', '.join(what)}" for other, what in lacking.items())
    raise ConfigError(FIELD, f"no backend serves this model here:{table}")


def obstacles(backend: type[AttentionBackend], needs: AttentionNeeds) -> list[str]:
    """What of the needs it does not serve; empty when it fits."""
    can = backend.capabilities
    cache_dtype = needs.cache_dtype or needs.dtype
    cache_dtypes = {needs.dtype} if can.cache_dtypes is None else can.cache_dtypes
    kinds = {
        "full attention": needs.full and not can.full,
        "windowed attention": needs.windowed and not can.windowed,
        "soft-capped attention": needs.soft_capped and not can.soft_capped,
        "attention sinks": needs.sinks and not can.sinks,
    }
    lacks = [
        f"device {needs.device.type}" if needs.device.type not in can.device_types else _old_gpu(needs.device, can.compute_capability),
        f"dtype {_short(needs.dtype)}" if needs.dtype not in can.dtypes else None,
        f"cache dtype {_short(cache_dtype)}" if cache_dtype not in cache_dtypes else None,
        f"head size {needs.head_size}" if not _has(can.head_sizes, needs.head_size) else None,
        f"block size {needs.block_size}" if not _has(can.block_sizes, needs.block_size) else None,
        f"{needs.group_ratio} query heads per key head" if not _has(can.group_ratios, needs.group_ratio) else None,
        *(kind if is_lacking else None for kind, is_lacking in kinds.items()),
        _missing(backend),
    ]
    return [lack for lack in lacks if lack]


def _old_gpu(device: torch.device, least: tuple[int, int] | None) -> str | None:
    if device.type != "cuda" or least is None:
        return None
    found = torch.cuda.get_device_capability(device)
    wanted = f"compute capability {least[0]}.{least[1]}"
    return None if found >= least else f"support of {device}: it needs {wanted}, found {found[0]}.{found[1]}"


def _has(served: frozenset[int] | None, wanted: int) -> bool:
    return served is None or wanted in served


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------ other packages


def _offered() -> dict[str, EntryPoint]:
    """By name, without those whose name is taken."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in _BACKENDS}


def _loadable() -> list[type[AttentionBackend]]:
    """For ``auto`` a package that is broken must not keep the others from serving."""
    found = []
    for point in _offered().values():
        try:
            found.append(_load(point))
        except ConfigError as error:
            logger.warning("%s", error)
    return found


def _load(point: EntryPoint) -> type[AttentionBackend]:
    """Raises ConfigError for what can't be loaded or is no backend of that name."""
    where = f"{point.name}, which {point.dist.name if point.dist else 'a package'} offers as {point.value},"
    try:
        backend = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, which may raise anything
        raise ConfigError(FIELD, f"{where} cannot be loaded ({_told(error)})") from error
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ConfigError(FIELD, f"{where} is not a class derived from worker.attention.AttentionBackend")
    if getattr(backend, "name", None) != point.name or not isinstance(
        getattr(backend, "capabilities", None), Capabilities
    ):
        raise ConfigError(FIELD, f"{where} must have its entry point's name and say its capabilities")
    if not isinstance(backend.preference, int):
        raise ConfigError(FIELD, f"{where} has preference {backend.preference!r:.80}, must be a whole number")
    if isabstract(backend):
        raise ConfigError(FIELD, f"{where} does not define {', '.join(sorted(backend.__abstractmethods__))}")
    return backend


def _missing(backend: type[AttentionBackend]) -> str | None:
    try:
        return backend.missing()
    except Exception as error:  # noqa: BLE001 - foreign code, as above
        return f"what it looks for ({_told(error)})"


def _made(backend: type[AttentionBackend]) -> AttentionBackend:
    """Raises ConfigError when its constructor fails."""
    try:
        return backend()
    except Exception as error:  # noqa: BLE001 - foreign code, as above
        raise ConfigError(FIELD, f"{backend.name} cannot be made ({_told(error)})") from error


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error):.200}"
