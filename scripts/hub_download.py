"""How do a model's files come from a hub? Through huggingface_hub, into the cache that other tools of the field share.

The hub is the one that HF_ENDPOINT names; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they always do.
"""

import errno
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from ipc.errors import ConfigError
from scripts.model_source import FIELD, HubName

logger = logging.getLogger(__name__)

NUM_CONNECTIONS = 4
PROGRESS_EVERY_S = 10.0

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
"""What else we read of a checkpoint, where it is there. Nothing that would have to be unpickled is ever fetched."""

OTHER_TOKENIZERS = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")
"""Fetched only where there is no tokenizer.json, so that the start can say what is missing."""

TEMPLATES_FOLDER = "additional_chat_templates/"


def cache_folder() -> Path:
    """Where huggingface_hub keeps what it fetched."""
    return Path(constants.HF_HUB_CACHE)


def fetch(name: HubName) -> tuple[Path, Path, list[str]]:
    """Path of the model on this host, the folder of its files, and their names below it.

    Without a connection a copy that any tool has left complete in the cache is taken.

    Raises:
        ConfigError: it can't be had; says why and what to do.
    """
    disable_progress_bars()
    for library in ("httpx", "httpx2"):
        # They tell of each request, several for each file.
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        folder, names = _fetch(name)
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, TransportError, OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        found = _copy_in_cache(name) if _is_connection_lost(error) else None
        if found is None:
            raise ConfigError(FIELD, _explained(name, error)) from None
        folder, names = found
        logger.warning("%s can't be reached; taking the copy of %s in %s", constants.ENDPOINT, name, folder)
    return (folder if name.file is None else folder / name.file), folder, names


def _fetch(name: HubName) -> tuple[Path, list[str]]:
    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    revision = info.sha or name.revision

    def get(file: str) -> Path:
        return Path(hf_hub_download(name.repo, file, revision=revision))

    if name.file is not None:
        if name.file not in sizes:
            raise ConfigError(FIELD, f"{name.repo} has no file {name.file!r}; {_gguf_choices(name, sizes)}")
        names = [name.file]
    else:
        names = _needed(name, sizes, _shards(get(INDEX)) if INDEX in sizes else None)
    total = sum(sizes[file] for file in names)
    logger.info("fetching %s from %s: %d files, %s", name, constants.ENDPOINT, len(names), _bytes(total))
    with _told_progress(name, total), ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        paths = list(pool.map(get, names))
    logger.info("fetched %s", name)
    depth = names[0].count("/")
    return paths[0].parents[depth], names


def _needed(name: HubName, sizes: Mapping[str, int], shards: list[str] | None) -> list[str]:
    """Files of a checkpoint, the small ones first. Raises ConfigError when there are no weights that we load."""
    weights = shards if shards is not None else [SINGLE] if SINGLE in sizes else None
    if weights is None:
        weights = sorted(file for file in sizes if file.endswith(".safetensors") and "/" not in file)
    missing = [file for file in weights if file not in sizes]
    if missing:
        raise ConfigError(FIELD, f"{name}: {INDEX} names {missing[0]!r:.80}, which the repository has not")
    if not weights:
        raise ConfigError(
            FIELD, f"{name} has no .safetensors files, and pickled ones (.bin, .pt) are never loaded; {_gguf_choices(name, sizes)}"
        )
    texts = [file for file in TEXT_FILES if file in sizes]
    texts += [file for file in sizes if file.startswith(TEMPLATES_FOLDER) and file.endswith(".jinja")]
    if "tokenizer.json" not in sizes:
        texts += [file for file in OTHER_TOKENIZERS if file in sizes]
    return [*texts, *([INDEX] if shards is not None else []), *weights]


def _shards(index: Path) -> list[str]:
    try:
        content = json.loads(index.read_bytes())
        return sorted({str(file) for file in content["weight_map"].values()})
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise ConfigError(FIELD, f"{index} has no 'weight_map'; fetch it again") from None


def _gguf_choices(name: HubName, sizes: Mapping[str, int]) -> str:
    files = sorted(file for file in sizes if file.endswith(".gguf"))
    if not files:
        return "choose a repository with safetensors or .gguf files"
    more = f" and {len(files) - 8} more" if len(files) > 8 else ""
    return "it has " + ", ".join(f"{name.repo}:{file}" for file in files[:8]) + more


def _copy_in_cache(name: HubName) -> tuple[Path, list[str]] | None:
    """A complete copy that somebody fetched before."""
    try:
        folder = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except (OSError, ValueError, TransportError):
        return None
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    try:
        names = [name.file] if name.file else _needed(name, sizes, _shards(folder / INDEX) if INDEX in sizes else None)
    except ConfigError:
        return None
    return (folder, names) if all(file in sizes for file in [*names, *([] if name.file else ["config.json"])]) else None


def _is_connection_lost(error: Exception) -> bool:
    return isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)) or (
        isinstance(error, TransportError) and not isinstance(error, HfHubHTTPError)
    )


def _explained(name: HubName, error: Exception) -> str:
    address = constants.ENDPOINT
    match error:
        case GatedRepoError():
            return (
                f"{name} is gated: accept its terms at {address}/{name.repo}, and set HF_TOKEN to a token of that account "
                "(or log in with `hf auth login`)"
            )
        case RepositoryNotFoundError():
            return (
                f"{str(name)!r} does not exist here, and {address} has no model {name.repo!r} that you may see; check the "
                "spelling, or set HF_TOKEN if it is private"
            )
        case RevisionNotFoundError():
            return f"{name.repo} has no revision {name.revision!r} on {address}"
        case EntryNotFoundError() if not isinstance(error, LocalEntryNotFoundError):
            return f"{name}: a file that the repository lists is missing on {address}: {_line(error)}"
        case OfflineModeIsEnabled():
            return f"{name} is not on this host, and HF_HUB_OFFLINE forbids to fetch it; unset it once, or give a local path"
        case FileMetadataError():
            return f"{address} does not answer like a hub: {_line(error)}; check HF_ENDPOINT"
        case HFValidationError():
            return f"{str(name)!r} is not a model's name: {_line(error)}"
        case OSError(errno=errno.ENOSPC):
            return f"there is no room for {name} in {cache_folder()}; free some, or set HF_HOME to a folder with room"
        case _ if _is_connection_lost(error):
            return (
                f"{str(name)!r} does not exist here, and {address} can't be reached to fetch it ({_line(error)}); check the "
                "network and HF_ENDPOINT, or give a local path"
            )
    return f"{name} can't be fetched from {address}: {_line(error)}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def _told_progress(name: HubName, total: int) -> Iterator[None]:
    """A line now and then; bars of several processes would write over each other."""
    blobs = cache_folder() / f"models--{name.repo.replace('/', '--')}" / "blobs"
    before = _size_of(blobs)
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_EVERY_S):
            logger.info("fetching %s: %s of %s", name, _bytes(_size_of(blobs) - before), _bytes(total))

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size_of(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        # Files are renamed while we look.
        return 0


def _bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{max(size, 0)} bytes"
