"""A package that brings attention backends, as pip leaves it in a folder of installed packages."""

from pathlib import Path


def write_package(folder: Path, module: str, code: str, entry_points: str) -> None:
    """``code`` is its only module; ``entry_points``: lines of ``name = module:class``. ``folder`` has to be on the path."""
    (folder / f"{module}.py").write_text(code)
    info = folder / "plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[brigade.attention_backends]\n{entry_points}\n")
