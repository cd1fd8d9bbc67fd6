"""Which attention backend is selected, what is said about the others, and may a package bring its own?"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ipc.errors import ConfigError
from tests.native import INSTRUCTION_SETS, use_instruction_set
from tests.plugins import write_package
from tests.tiny import random_llama
from worker.attention import AttentionNeeds, Capabilities, backend_names, registry, select_backend
from worker.attention.registry import obstacles
from worker.attention.torch_backend import TorchBackend
from worker.attention.triton_backend import TritonBackend
from worker.model_config import read_model_config
from worker.settings import ATTENTION_BACKENDS

CPU = torch.device("cpu")
PLAIN = AttentionNeeds(device=CPU, dtype=torch.float32, head_size=64, block_size=16)


def select(name: str = "auto", **changes: Any) -> str:
    return select_backend(name, replace(PLAIN, **changes)).name


def test_selection(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO):
        assert select("torch", dtype=torch.bfloat16) == "torch"
        use_instruction_set("torch", monkeypatch)
        assert select() == "torch"
    lines = [record.message for record in caplog.records]
    assert lines[0] == "attention backend torch (asked for)"
    assert lines[1].startswith("attention backend torch (best that fits; ")
    assert "; cpu lacks native code (no compiler when Brigade was installed?)" in lines[1]
    assert len(lines) == 2
    with pytest.raises(ConfigError, match="cpu cannot be used, it lacks native code"):
        select("cpu")


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="no compiler when this was installed")
def test_native_code_is_preferred_where_it_serves() -> None:
    assert select() == "cpu"
    assert select(windowed=True, soft_capped=True, sinks=True) == "cpu"
    assert select(head_size=24) == "torch"
    assert select(block_size=8) == "torch"
    with pytest.raises(ConfigError, match="cpu cannot be used, it lacks head size 24, block size 8$"):
        select("cpu", head_size=24, block_size=8)


def test_what_nothing_serves_ends_in_a_table() -> None:
    with pytest.raises(ConfigError, match="--attention-backend: 'flash' is unknown; give auto or one of .*torch"):
        select("flash")
    with pytest.raises(ConfigError, match="torch cannot be used, it lacks device meta"):
        select("torch", device=torch.device("meta"))
    with pytest.raises(ConfigError) as caught:
        select(dtype=torch.float64, head_size=24)
    first, *rows = caught.value.message.splitlines()
    assert first.endswith("no backend serves this model here:")
    assert {row.split()[0] for row in rows} == set(backend_names())
    assert any(row.split() == ["torch", "lacks", "dtype", "float64"] for row in rows)
    assert any(row.split()[0] == "cpu" and "dtype float64, head size 24" in row for row in rows)


class Narrow(TorchBackend):
    """Serves hardly anything."""

    name = "narrow"
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32}),
        cache_dtypes=frozenset({torch.bfloat16}),
        compute_capability=(9, 0),
        group_ratios=frozenset({1, 8}),
        full=False,
    )


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({}, []),
        ({"full": True}, ["full attention"]),
        ({"windowed": True}, ["windowed attention"]),
        ({"soft_capped": True, "sinks": True}, ["soft-capped attention", "attention sinks"]),
        ({"group_ratio": 3}, ["3 query heads per key head"]),
        ({"cache_dtype": torch.float16}, ["cache dtype float16"]),
        ({"cache_dtype": None}, ["cache dtype float32"]),
        ({"dtype": torch.float16}, ["dtype float16"]),
    ],
)
def test_each_capability_is_asked(changes: dict[str, Any], lacks: list[str]) -> None:
    needs = replace(PLAIN, full=False, cache_dtype=torch.bfloat16)
    assert obstacles(Narrow, replace(needs, **changes)) == lacks


def test_a_cache_of_another_type_is_not_taken_for_granted() -> None:
    assert obstacles(TorchBackend, PLAIN) == []
    assert obstacles(TorchBackend, replace(PLAIN, cache_dtype=torch.bfloat16)) == ["cache dtype bfloat16"]


@pytest.mark.parametrize(("found", "lacks"), [((9, 0), []), ((8, 9), ["support of cuda:0: it needs compute capability 9.0, found 8.9"])])
def test_compute_capability(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], lacks: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    needs = replace(PLAIN, full=False, cache_dtype=torch.bfloat16, device=torch.device("cuda", 0))
    assert obstacles(Narrow, needs) == lacks


@pytest.mark.parametrize(("found", "chosen"), [((7, 5), "torch"), ((8, 0), "triton"), ((10, 0), "triton")])
def test_gpus_get_triton(monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    cuda = torch.device("cuda", 0)
    assert select(device=cuda, windowed=True, soft_capped=True, sinks=True, group_ratio=71) == chosen
    assert select(device=cuda, head_size=20) == select(device=cuda, head_size=264) == "torch"
    monkeypatch.setattr(TritonBackend, "missing", staticmethod(lambda: "triton"))
    assert select(device=cuda) == "torch"
    with pytest.raises(ConfigError, match="triton cannot be used, it lacks device cpu, triton"):
        select("triton")


def test_what_a_model_needs(tmp_path: Path) -> None:
    config = read_model_config(str(random_llama(tmp_path / "model", num_layers=2)))

    def needs(**changes: Any) -> AttentionNeeds:
        return AttentionNeeds.of(replace(config, **changes), device=CPU, dtype=torch.float32, block_size=8)

    plain = AttentionNeeds(device=CPU, dtype=torch.float32, head_size=16, block_size=8, group_ratio=2)
    assert needs() == plain
    assert needs(layer_windows=(4, None)) == replace(plain, windowed=True)
    assert needs(layer_windows=(4, 4)) == replace(plain, windowed=True, full=False)
    assert needs(attention_soft_cap=30.0) == replace(plain, soft_capped=True)


def test_help_names_ours() -> None:
    assert tuple(registry._BACKENDS) == tuple(sorted(ATTENTION_BACKENDS, key=list(registry._BACKENDS).index))


# ------------------------------------------------------------------------------------------ other packages

PLUGIN = '''
from worker.attention import AttentionBackend
from worker.attention.torch_backend import TorchBackend

class Foreign(TorchBackend):
    name = "foreign"
    preference = {preference}

class Nameless(TorchBackend):
    pass

class Unfinished(AttentionBackend):
    name = "foreign"
    preference = {preference}
    capabilities = TorchBackend.capabilities

class Mute(Foreign):
    capabilities = None

class Unranked(Foreign):
    preference = None

class Helpless(Foreign):
    @staticmethod
    def missing():
        raise OSError("no driver")

class Stillborn(Foreign):
    def __init__(self):
        raise OSError("no device")

number = 7
'''


class Package:
    """An installed package, as importlib.metadata sees it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch

    def install(self, entry_points: str, *, preference: int = 0) -> None:
        module = f"brigade_plugin_{abs(hash(self.folder))}"
        write_package(self.folder, module, PLUGIN.format(preference=preference), entry_points.replace("MODULE", module))
        self.monkeypatch.syspath_prepend(self.folder)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    return Package(tmp_path, monkeypatch)


def test_a_package_brings_a_backend(package: Package) -> None:
    package.install("foreign = MODULE:Foreign")
    assert backend_names()[-1] == "foreign"
    assert select("foreign") == "foreign"
    assert select() != "foreign"


def test_a_preferred_one_is_taken(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package.install("foreign = MODULE:Foreign", preference=1000)
    assert select() == "foreign"
    with pytest.raises(ConfigError, match="foreign cannot be used, it lacks dtype float64"):
        select("foreign", dtype=torch.float64)


@pytest.mark.parametrize(
    ("entry_point", "problem"),
    [
        ("foreign = MODULE:Absent", "foreign, which plugin offers as .*:Absent, cannot be loaded .AttributeError"),
        ("foreign = no_such_module:Foreign", "cannot be loaded .ModuleNotFoundError"),
        ("foreign = MODULE:number", "is not a class derived from worker.attention.AttentionBackend"),
        ("foreign = MODULE:Nameless", "must have its entry point's name"),
        ("foreign = MODULE:Mute", "must have its entry point's name and say its capabilities"),
        ("foreign = MODULE:Unranked", "has preference None, must be a whole number"),
        ("foreign = MODULE:Unfinished", "does not define attend, cache_shape, make_builder, write"),
        ("foreign = MODULE:Stillborn", "foreign cannot be made .OSError: no device"),
    ],
)
def test_a_broken_one_hinders_nobody_else(
    package: Package, caplog: pytest.LogCaptureFixture, entry_point: str, problem: str
) -> None:
    """Although it would be preferred."""
    package.install(entry_point, preference=1000)
    with pytest.raises(ConfigError, match=problem):
        select("foreign")
    assert select() in ATTENTION_BACKENDS
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "foreign" in warning.message


def test_one_that_cannot_say_what_is_missing_lacks_that(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    package.install("foreign = MODULE:Helpless", preference=1000)
    with pytest.raises(ConfigError, match="foreign cannot be used, it lacks what it looks for .OSError: no driver"):
        select("foreign")
    with caplog.at_level(logging.INFO):
        assert select() in ATTENTION_BACKENDS
    assert "foreign lacks what it looks for (OSError: no driver)" in caplog.text


def test_a_module_that_ends_the_process_is_not_let(package: Package) -> None:
    package.install("foreign = MODULE:Foreign")
    (module,) = package.folder.glob("brigade_plugin_*.py")
    module.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match="cannot be loaded .SystemExit: 3"):
        select("foreign")
    assert select() in ATTENTION_BACKENDS


def test_our_names_are_taken(package: Package) -> None:
    package.install("torch = MODULE:Foreign")
    assert type(select_backend("torch", PLAIN)) is TorchBackend
    with pytest.raises(ValueError, match="'torch' is registered already"):
        registry.register(TorchBackend)
