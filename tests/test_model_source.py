"""Is a model found on this host, or fetched from a hub, once and whole, whoever dies meanwhile? (U2)"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ipc.errors import ConfigError
from scripts import launch
from scripts.model_source import HubName, find_model, parse_hub_name
from tests.conftest import Checkpoints
from tests.fake_hub import COMMIT, FakeHub

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120.0

FIND = """
import sys
from ipc.errors import ConfigError
from scripts.model_source import find_model
print("started", flush=True)
try:
    source = find_model(sys.argv[1])
    print(source.path, source.name, flush=True)
except ConfigError as error:
    print("refused", error, flush=True)
"""

WEIGHTS = b"weights " * 2048
SMALL = {
    # Different contents: what is the same is fetched once in all.
    "config.json": b"{}", "tokenizer.json": b"{ }", "tokenizer_config.json": b"{  }", "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"\x80pickle", "README.md": b"#", ".gitattributes": b"", "onnx/model.onnx": b"x",
    "tokenizer.model": b"x", "model.q4.gguf": b"GGUF4", "sub/model.q8.gguf": b"GGUF8",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}  # fmt: skip
WANTED = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"}
SHARDED = {
    "config.json": b"{}", "tokenizer.model": b"x", "consolidated.safetensors": b"x",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": b"1", "model-2.safetensors": b"22",
}  # fmt: skip
REPOS: dict[str, Mapping[str, bytes]] = {
    "org/small": SMALL, "org/sharded": SHARDED, "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    "org/quantized": {"m.q4.gguf": b"G", "m.q8.gguf": b"G"}, "org/secret": SMALL,
    "org/holed": {k: v for k, v in SHARDED.items() if k != "model-2.safetensors"},
}  # fmt: skip


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(REPOS, gated=frozenset(["org/secret"])) as running:
        yield running


class Host:
    """Processes of one host, with a cache of their own."""

    def __init__(self, home: Path, endpoint: str) -> None:
        names = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(ROOT)}
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()} | names

    def start(self, model: str, **more: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", FIND, model], cwd=ROOT, env=self.environment | more, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def find(self, model: str, **more: str) -> str:
        return result_of(self.start(model, **more))


@pytest.fixture
def host(tmp_path: Path, hub: FakeHub) -> Host:
    return Host(tmp_path / "hf", hub.url)


def result_of(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return out.removeprefix("started\n").strip()


# --------------------------------------------------------------------------------------------------------- fetching


def test_u2_two_processes_on_a_cold_cache_ask_for_each_file_once(tmp_path: Path, hub: FakeHub) -> None:
    for attempt in range(10):
        hub.requests.clear()
        host = Host(tmp_path / str(attempt), hub.url)
        both = [host.start("org/small") for _ in range(2)]
        found = {result_of(process) for process in both}
        assert len(found) == 1
        path, name = found.pop().split()
        assert name == "org/small" and path.endswith(COMMIT)
        fetched = {key: count for key, count in hub.requests.items() if key[0] == "GET" and not key[1].startswith("api")}
        assert fetched == {("GET", f"org/small/{file}"): 1 for file in WANTED}
        assert hub.count("GET", "api/models/org/small/revision/main") == 1
        assert {str(file.relative_to(path)) for file in Path(path).rglob("*") if file.is_file()} == WANTED
        assert (Path(path) / "model.safetensors").read_bytes() == WEIGHTS


def test_u2_a_download_that_is_killed_is_gone_on_with(hub: FakeHub, host: Host) -> None:
    """The lock is free as soon as its holder is dead, and what waited for it fetches what is missing."""
    hub.allowed_bytes = len(WEIGHTS) // 2
    first = host.start("org/small")
    assert hub.stalled.wait(TIMEOUT_S)
    second = host.start("org/small")
    assert second.stdout is not None and second.stdout.readline() == "started\n"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=TIMEOUT_S)
    hub.release()
    path = Path(result_of(second).split()[0])
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == WANTED


def test_what_was_fetched_needs_no_network_any_more(hub: FakeHub, host: Host) -> None:
    path = host.find("org/small").split()[0]
    hub.requests.clear()
    assert host.find("org/small") == host.find("org/small", HF_HUB_OFFLINE="1") == f"{path} org/small"
    assert hub.num_requests == 0
    # A file that somebody removed is fetched again.
    (Path(path) / "config.json").unlink()
    assert host.find("org/small") == f"{path} org/small"
    assert (Path(path) / "config.json").is_file() and hub.count("GET", "org/small/model.safetensors") == 0


def test_a_copy_that_another_tool_fetched_is_taken_without_a_network(hub: FakeHub, host: Host) -> None:
    other = "import sys; from huggingface_hub import hf_hub_download as get; print([get('org/sharded', name) for name in sys.argv[1:]][0])"
    words = [sys.executable, "-c", other, *SHARDED]
    done = subprocess.run(words, env=host.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    path = done.stdout.strip().rpartition("/")[0]
    assert done.returncode == 0, done.stderr
    hub.requests.clear()
    assert host.find("org/sharded", HF_HUB_OFFLINE="1") == f"{path} org/sharded"
    (Path(path) / "model-2.safetensors").unlink()
    assert host.find("org/sharded", HF_HUB_OFFLINE="1").startswith("refused MODEL: org/sharded is not on this host, and HF_HUB_OFFLINE")
    assert hub.num_requests == 0


def test_shards_are_those_of_the_index(hub: FakeHub, host: Host) -> None:
    path = Path(host.find("org/sharded").split()[0])
    assert {file.name for file in path.iterdir()} == SHARDED.keys() - {"consolidated.safetensors"}
    assert hub.count("GET", "org/sharded/model.safetensors.index.json") == 1


@pytest.mark.parametrize(("model", "content"), [("org/small:model.q4.gguf", b"GGUF4"), (f"org/small@{COMMIT}:sub/model.q8.gguf", b"GGUF8")])
def test_a_gguf_file_comes_alone(hub: FakeHub, host: Host, model: str, content: bytes) -> None:
    path, name = host.find(model).split()
    assert Path(path).read_bytes() == content and name == model
    assert [key for key in hub.requests if key[0] == "GET" and "api" not in key[1]] == [("GET", f"org/small/{model.partition(':')[2]}")]


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("model", "words"), [
    ("org/nothing", ["'org/nothing' does not exist here", "has no model 'org/nothing'", "HF_TOKEN"]),
    ("org/secret", ["org/secret is gated", "accept its terms at http://127.0.0.1", "HF_TOKEN"]),
    ("org/small@v9", ["org/small has no revision 'v9'"]),
    ("org/small:none.gguf", ["has no file 'none.gguf'", "it has org/small:model.q4.gguf, org/small:sub/model.q8.gguf"]),
    ("org/pickled", ["has no .safetensors files", "never loaded", "choose a repository"]),
    ("org/quantized", ["has no .safetensors files", "it has org/quantized:m.q4.gguf, org/quantized:m.q8.gguf"]),
    ("org/holed", ["names 'model-2.safetensors', which the repository has not"]),
])  # fmt: skip
def test_what_can_not_be_fetched_is_explained(host: Host, model: str, words: list[str]) -> None:
    said = host.find(model)
    assert said.startswith("refused MODEL: ") and "Traceback" not in said
    for word in words:
        assert word in said


def test_a_hub_that_is_not_there_is_explained(host: Host) -> None:
    said = host.find("org/small", HF_ENDPOINT="http://127.0.0.1:1")
    assert said.startswith("refused MODEL: 'org/small' does not exist here, and http://127.0.0.1:1 can't be reached")
    assert "HF_ENDPOINT" in said


def test_a_cache_that_can_not_be_written_is_explained(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = host.find("org/small", HF_HOME=str(tmp_path / "file"))
    assert said.startswith("refused MODEL: org/small can't be fetched: ") and "HF_HOME" in said


# ------------------------------------------------------------------------------------------------------- local paths


def test_a_local_path_asks_nobody(hub: FakeHub, host: Host, tmp_path: Path, checkpoints: Checkpoints) -> None:
    for path in (checkpoints.fx_r, checkpoints.fx_r_gguf):
        assert host.find(str(path)) == f"{path} {path.name}"
    assert hub.num_requests == 0 and not (tmp_path / "hf").exists()


def test_a_folder_wins_over_a_hubs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("org/small").path == "org/small"


def test_a_local_path_loads_nothing_of_the_hub(tmp_path: Path) -> None:
    script = (
        "import sys; from scripts.model_source import find_model; find_model(sys.argv[1]); "
        "print([name for name in sys.modules if name.startswith('huggingface_hub')])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


@pytest.mark.parametrize("model", ["/no/such/path", "./org/name", "nothing", "a/b/c", "org/../x", "org/name:file.bin", "org/name@", "", "org/", "~/x"])
def test_what_is_neither_a_path_nor_a_name_is_refused(model: str) -> None:
    assert parse_hub_name(model) is None
    with pytest.raises(ConfigError, match="it must be a folder, a .gguf file, or a hub's ORG/NAME"):
        find_model(model)


def test_serve_refuses_it_before_it_starts_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.launch.Launcher.run", lambda _: pytest.fail("ranks were started"))
    result = CliRunner().invoke(launch.command, ["./typo.gguf"])
    assert result.exit_code == 1
    assert "brigade: MODEL: './typo.gguf' does not exist; it must be a folder" in result.stderr


@pytest.mark.parametrize(("model", "name"), [
    ("org/name", HubName(repo="org/name")), ("O-1/n.a_m-e", HubName(repo="O-1/n.a_m-e")),
    ("org/name@v1.0", HubName(repo="org/name", revision="v1.0")), ("org/name@refs/pr/1", HubName(repo="org/name", revision="refs/pr/1")),
    ("org/name:a b.gguf", HubName(repo="org/name", file="a b.gguf")),
    ("org/name@r:x/y.gguf", HubName(repo="org/name", revision="r", file="x/y.gguf")),
])  # fmt: skip
def test_names_are_read(model: str, name: HubName) -> None:
    assert parse_hub_name(model) == name
    assert str(name) == model


def test_inspect_takes_a_hubs_name(hub: FakeHub, host: Host, checkpoints: Checkpoints) -> None:
    files = {path.name: path.read_bytes() for path in checkpoints.fx_r.iterdir()}
    hub.repos = {"org/tiny": files}
    words = [sys.executable, "-m", "scripts.cli", "inspect", "org/tiny", "--json", "--no-measure"]
    done = subprocess.run(words, cwd=ROOT, env=host.environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["model"], report["num_layers"]) == ("org/tiny", 5)
