"""Where is the model that a user named: a folder, a file, or the name of one on a hub?

A path that exists never touches the network. A name of a hub's is fetched once per host: one process does, under a lock that
the kernel frees if it dies, and the others wait. What has been fetched is used from then on without asking the hub.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ipc.errors import ConfigError

logger = logging.getLogger(__name__)

FIELD = "MODEL"
FORMS = "a folder, a .gguf file, or a hub's ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf"

_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.][\w./-]*))?(:(?P<file>[^:]+\.gguf))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on a hub."""

    repo: str
    """ORG/NAME."""

    revision: str = "main"
    """A branch, a tag or a commit."""

    file: str | None = None
    """A .gguf file of the repository; None for a checkpoint of safetensors files."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}{'' if self.file is None else ':' + self.file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that is on this host."""

    path: str
    """A folder or a file."""

    name: str
    """How clients know it."""


def find_model(model: str) -> ModelSource:
    """The model on this host, fetched if it has to be; may take as long as a download takes.

    Raises:
        ConfigError: there is no such path or name, or it can't be fetched; says what to do.
    """
    if os.path.exists(model):
        return ModelSource(path=model, name=Path(model).resolve().name)
    name = _require_name(model)
    # Loads what only a download needs.
    from scripts.hub_download import cache_folder, fetch

    receipt = _Receipt(cache_folder(), name)
    path = receipt.read()
    if path is None:
        with receipt.locked():
            # Whoever had the lock before us may have fetched it.
            path = receipt.read()
            if path is None:
                fetched = fetch(name)
                receipt.write(*fetched)
                path = fetched[0]
    return ModelSource(path=str(path), name=str(name))


def check_form(model: str) -> None:
    """Before anything slow starts: whether ``model`` can be one at all. Asks no hub.

    Raises:
        ConfigError: it is neither a path that exists nor of the form of a hub's name.
    """
    if not os.path.exists(model):
        _require_name(model)


def _require_name(model: str) -> HubName:
    name = parse_hub_name(model)
    if name is None:
        raise ConfigError(FIELD, f"{model!r} does not exist; it must be {FORMS}")
    return name


def parse_hub_name(model: str) -> HubName | None:
    """None for what can't be a name on a hub."""
    found = _HUB_NAME.fullmatch(model)
    if found is None or ".." in model or "//" in model:
        return None
    return HubName(repo=found["repo"], revision=found["revision"] or "main", file=found["file"])


class _Receipt:
    """Says that a model is complete on this host, and where; written when all of it is there."""

    def __init__(self, cache: Path, name: HubName) -> None:
        readable = re.sub(r"[^\w.-]", "-", str(name), flags=re.ASCII)[:80]
        key = hashlib.sha256(str(name).encode()).hexdigest()[:16]
        self._file = cache / "brigade" / f"{readable}-{key}.json"
        self._name = name

    def read(self) -> Path | None:
        """Where the model is; None if it was not fetched, or if a file of it is gone."""
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            folder = Path(content["folder"])
            if all((folder / name).stat().st_size == size for name, size in content["sizes"].items()):
                return folder if self._name.file is None else folder / self._name.file
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        return None

    def write(self, path: Path, folder: Path, names: list[str]) -> None:
        """``names``: the files below ``folder`` that make up the model at ``path``."""
        sizes = {name: (folder / name).stat().st_size for name in names}
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps({"folder": str(folder), "sizes": sizes}), encoding="utf-8")
        os.replace(draft, self._file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process of this host at a time. The lock's file stays: removing it would let two in."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                FIELD, f"{self._name} can't be fetched: {error.filename} can't be written ({error.strerror}); set HF_HOME to a "
                "folder of yours",
            ) from None  # fmt: skip
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("another process fetches %s; waiting for it", self._name)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
