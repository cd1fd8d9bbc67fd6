"""Do the folders keep to design.md: who imports whom, how long files get, which names and calls are not used?"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "ipc": set(),
    "kernels": set(),
    "engine": {"ipc"},
    "worker": {"ipc", "kernels"},
    "scripts": {"ipc", "kernels", "engine", "worker"},
}
"""Folder to the other folders of ours that it may import."""

MUST_NOT_IMPORT = {
    "ipc": {"torch", "triton", "transformers", "accelerate"},
    "kernels": {"zmq", "msgpack"},
    "engine": {"torch", "triton", "transformers", "accelerate"},
    "worker": {"transformers", "accelerate"},
    "scripts": set(),
}
"""Folder to libraries of others that would break its promise; transformers is the tests' oracle, never a part of us."""

LAZY_IMPORTS = {
    "scripts/inspect_model.py": "help and what is wrong with a path are told before torch is loaded",
    "scripts/model_source.py": "a model that is here needs nothing of what downloads do",
    "scripts/serve.py": "signals are taken over before anything slow is imported",
    "scripts/rank.py": "torch is loaded after everything that can be checked, and started, without it",
}
"""Files whose functions may hold import statements. Elsewhere only an optional dependency in `try: … except ImportError`."""

IMPORTS_BY_NAME = {
    "scripts/cli.py": "a command's module is loaded when the command is asked for",
    "worker/logits_processors.py": "an operator names functions of modules of their own",
    "worker/models/building.py": "a model family is loaded when a checkpoint asks for it",
}
"""Files that may call importlib.import_module."""

PICKLING_MODULES = {"pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
PICKLING_MODULES |= {"multiprocessing", "torch.multiprocessing", "torch.distributed.rpc", "xmlrpc"}
PICKLE_FREE = {"multiprocessing.shared_memory", "multiprocessing.resource_tracker"}

PICKLING_CALLS = {"send_pyobj", "recv_pyobj", "all_gather_object", "gather_object", "broadcast_object_list"}
PICKLING_CALLS |= {"scatter_object_list", "send_object_list", "recv_object_list", "ProcessPoolExecutor"}
PICKLING_TORCH = {"load", "save", "package"}

MAX_LINES = 600
MAX_README_LINES = 120


def source_files(*folders: str) -> list[str]:
    """Paths relative to the root of every Python file below the folders."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


OURS = source_files(*MAY_IMPORT)


# ------------------------------------------------------------------------- the rules, as functions of a file's text


def imported_modules(file: str, tree: ast.AST) -> Iterator[str]:
    """Full names of what a file imports; `from a import b` counts as `a.b`, whether b is a module or not."""
    package = Path(file).parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_directions(file: str, text: str) -> list[str]:
    folder = Path(file).parts[0]
    forbidden = (set(MAY_IMPORT) - MAY_IMPORT[folder] - {folder}) | MUST_NOT_IMPORT[folder] | {"tests"}
    names = imported_modules(file, ast.parse(text))
    return sorted({f"imports {name}" for name in names if name.split(".")[0] in forbidden})


def hidden_imports(file: str, text: str) -> list[str]:
    tree = ast.parse(text)
    found = []
    if file not in LAZY_IMPORTS:
        optional = set(_guarded_imports(tree))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                inner = (node for node in ast.walk(function) if isinstance(node, ast.Import | ast.ImportFrom))
                found += [f"line {node.lineno}: import in a function" for node in inner if node not in optional]
    if file not in IMPORTS_BY_NAME:
        for node in ast.walk(tree):
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name in ("import_module", "__import__"):
                found.append(f"line {node.lineno}: {name}")
    return sorted(set(found))


def _guarded_imports(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any("ImportError" in ast.dump(h.type) for h in node.handlers if h.type):
            yield from (inner for statement in node.body for inner in ast.walk(statement))


def pickling(file: str, text: str) -> list[str]:
    tree = ast.parse(text)
    found = {f"imports {name}" for name in imported_modules(file, tree) if _pickles(name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            owner = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
            if name in PICKLING_CALLS or (owner == "torch" and name in PICKLING_TORCH):
                found.add(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Constant) and node.value in PICKLING_CALLS:
            found.add(f"line {node.lineno}: {node.value}")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.add(f"line {node.lineno}: {node.func.id}")
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not is_off:
                    found.add(f"line {node.lineno}: allow_pickle")
    return sorted(found)


def _pickles(name: str) -> bool:
    if any(name == safe or name.startswith(f"{safe}.") for safe in PICKLE_FREE):
        return False
    is_torch_io = name.startswith("torch.") and name.split(".")[-1] in PICKLING_TORCH
    is_call = name.rsplit(".", 1)[-1] in PICKLING_CALLS
    return is_torch_io or is_call or any(name == bad or name.startswith(f"{bad}.") for bad in PICKLING_MODULES)


# ------------------------------------------------------------------------------------------- the rules on our files


@pytest.mark.parametrize("file", OURS)
def test_imports_go_in_the_allowed_directions_only(file: str) -> None:
    assert wrong_directions(file, (ROOT / file).read_text()) == []


@pytest.mark.parametrize("file", OURS)
def test_no_import_hides_in_a_function(file: str) -> None:
    assert hidden_imports(file, (ROOT / file).read_text()) == []


@pytest.mark.parametrize("file", OURS)
def test_nothing_pickles_or_evaluates(file: str) -> None:
    assert pickling(file, (ROOT / file).read_text()) == []


def test_no_file_is_longer_than_600_lines() -> None:
    files = [*source_files(*MAY_IMPORT, "tests"), *(str(p.relative_to(ROOT)) for p in ROOT.glob("scripts/*.sh"))]
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in files}
    assert {file: length for file, length in lengths.items() if length > MAX_LINES} == {}


def test_the_readme_fits_on_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_no_module_is_called_like_one_of_the_standard_library() -> None:
    names = {part for file in source_files(*MAY_IMPORT, "tests") for part in Path(file).with_suffix("").parts}
    assert names & sys.stdlib_module_names == set()


def test_every_folder_of_ours_is_a_package_and_no_folder_of_the_tests_is() -> None:
    folders = {(ROOT / file).parent for file in OURS}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_engine_and_ipc_start_without_torch() -> None:
    modules = [Path(file).with_suffix("").as_posix().replace("/", ".") for file in source_files("engine", "ipc")]
    heavy = sorted(MUST_NOT_IMPORT["engine"])
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name.removesuffix('.__init__'))\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


# --------------------------------------------------------------------------------- the rules see what they should


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ipc/x.py", "import torch"),
        ("ipc/x.py", "from engine import core"),
        ("kernels/x.py", "import zmq.asyncio"),
        ("kernels/x.py", "from worker.layers import linear"),
        ("engine/x.py", "import torch.distributed as dist"),
        ("engine/x.py", "def f():\n    from worker import partition"),
        ("worker/x.py", "from engine.request import Request"),
        ("worker/x.py", "import scripts"),
        ("worker/x.py", "from tests import fakes"),
        ("engine/text/x.py", "if TYPE_CHECKING:\n    import torch"),
        ("scripts/x.py", "import tests.fakes"),
    ],
)
def test_a_wrong_direction_is_seen(file: str, text: str) -> None:
    assert wrong_directions(file, text)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("worker/x.py", "def f():\n    import numpy"),
        ("worker/x.py", "class A:\n    async def f(self):\n        if True:\n            from ipc import codec"),
        ("engine/x.py", "import importlib\nimportlib.import_module('torch')"),
        ("engine/x.py", "__import__('torch')"),
        ("worker/x.py", "def f():\n    try:\n        import numpy\n    except ValueError:\n        return"),
    ],
)
def test_a_hidden_import_is_seen(file: str, text: str) -> None:
    assert hidden_imports(file, text)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as c",
        "from multiprocessing import Queue",
        "import multiprocessing",
        "import multiprocessing.connection",
        "socket.send_pyobj(1)",
        "getattr(socket, 'recv_pyobj')()",
        "torch.load('x')",
        "from torch import load",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "import torch.distributed.rpc",
        "from concurrent.futures import ProcessPoolExecutor",
        "numpy.load('x', allow_pickle=True)",
        "eval('1')",
        "exec('1')",
    ],
)
def test_pickling_is_seen(text: str) -> None:
    assert pickling("worker/x.py", text)


@pytest.mark.parametrize(
    "text",
    [
        "from multiprocessing import shared_memory\nfrom multiprocessing.shared_memory import SharedMemory",
        "model.eval()\njson.load(file)\nnumpy.load('x', allow_pickle=False)",
        "try:\n    import llguidance\nexcept ImportError:\n    llguidance = None",
        "from ipc.codec import decode\nfrom worker import layers\nfrom . import links\nfrom .links import gloo",
    ],
)
def test_what_is_allowed_passes(text: str) -> None:
    file = "worker/x.py"
    assert [*wrong_directions(file, text), *hidden_imports(file, text), *pickling(file, text)] == []
