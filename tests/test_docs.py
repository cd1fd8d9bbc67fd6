"""Is what the docs say true where a machine can tell: tables, links, options, messages, manifests?"""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import yaml

from ipc import messages, views
from ipc.codec import encode
from ipc.errors import RequestError
from ipc.messages import AddRequest
from ipc.params import INTEGER_LIMITS, NUMBER_LIMITS, SamplingParams
from ipc.registry import MESSAGE_TYPES
from scripts.cli import COMMANDS
from scripts.cli import main as brigade
from scripts.options import SERVE_OPTIONS
from scripts.write_docs import PAGES, render

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MARKDOWN = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
MANIFESTS = sorted((DOCS / "deploy").glob("*.yaml"))
CLIENT_MESSAGES = {tag: cls for tag, cls in MESSAGE_TYPES.items() if "client" in (cls.__doc__ or "").partition(":")[0]}


# ------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("page", PAGES)
def test_tables_say_what_the_code_says(page: str) -> None:
    assert render(page) == (DOCS / page).read_text(), "run `python -m scripts.write_docs`"


def test_every_command_has_its_table() -> None:
    text = (DOCS / "parameters.md").read_text()
    assert [name for name in COMMANDS if f"<!-- table: options {name} -->" not in text] == []


def test_every_option_and_parameter_stands_in_parameters() -> None:
    text = (DOCS / "parameters.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert {f.name for f in fields(SamplingParams)} - rows == set()
    for name in COMMANDS:
        command = brigade.get_command(click.Context(brigade), name)
        assert command is not None
        for option in (p for p in command.params if isinstance(p, click.Option) and not p.hidden):
            assert all(f"`{one}`" in text for one in [*option.opts, *option.secondary_opts]), option.name


def test_limits_in_the_tables_are_those_that_are_kept() -> None:
    for name, (low, high) in {**INTEGER_LIMITS, **NUMBER_LIMITS}.items():
        SamplingParams(**{name: high})
        for beyond in (low - 1, high + 1):
            with pytest.raises(RequestError, match=name):
                SamplingParams(**{name: beyond})


def test_every_client_message_and_field_stands_in_the_protocol_under_its_tag() -> None:
    text = (DOCS / "protocol.md").read_text()
    assert len(CLIENT_MESSAGES) == 11
    parts = {"TokenLogprobs": "a part", "TimelineLane": "a part"}
    for name, tag in {**{cls.__name__: str(tag) for tag, cls in CLIENT_MESSAGES.items()}, **parts}.items():
        section = text.partition(f"\n### {name} ({tag})\n")[2].partition("\n### ")[0]
        named = re.findall(r"^\| \d+ \| `(\w+)` \|", section, re.MULTILINE)
        assert named == [f.name for f in fields(getattr(messages, name, None) or getattr(views, name))], name


def test_the_example_in_the_protocol_is_what_is_sent() -> None:
    request = AddRequest(
        request_id="a", prompt_token_ids=np.array([5, 6, 7], np.int32), params=SamplingParams(max_tokens=4)
    )
    shown = [
        bytes.fromhex(line) for line in re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", (DOCS / "protocol.md").read_text(), re.M)
    ]  # fmt: skip
    version, tag, head, prompt, output = (bytes(frame) for frame in encode(request))
    assert shown[:2] == [version, tag] and shown[3] == prompt and output == b""
    # Ours writes all fields; the example leaves out the trailing ones, but for the header of the array they are the same.
    assert shown[2][0] == 0x93 and head[0] == 0x99
    assert head[1:].startswith(shown[2][1:])


# ------------------------------------------------------------------------------------------------ links


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Targets within the project: file, and the heading behind the #."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if not re.match(r"\w+:", target):
            file, _, heading = target.partition("#")
            yield file, heading


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, heading in links(page):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {file}"
        assert not heading or heading in anchors(target), f"{page.name}: {file}#{heading}"


def test_the_readme_leads_to_every_page_of_the_docs_that_has_no_other_way_in() -> None:
    reached = {(page.parent / file).resolve() for page in MARKDOWN for file, _ in links(page) if file}
    mentioned = "".join(page.read_text() for page in MARKDOWN)
    pages = [page for page in sorted(DOCS.glob("*.*")) if page.resolve() not in reached]
    assert [page.name for page in pages if page.name not in mentioned] == []


def test_files_that_the_walk_names_are_there() -> None:
    named = re.findall(r"`((?:ipc|engine|worker|kernels|scripts|tests)/[\w/.]*)`", (DOCS / "architecture.md").read_text())
    assert len(named) > 40 and [name for name in named if not (ROOT / name).exists()] == []


def test_the_tests_that_hold_promises_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "security.md").read_text())
    assert len(named) > 20
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()] == []


def test_every_promise_of_security_names_a_test() -> None:
    promises = (DOCS / "security.md").read_text().partition("| promise | held by |\n|---|---|\n")[2].partition("\n\n")[0]
    assert promises and [line for line in promises.splitlines() if "::" not in line] == []


# ------------------------------------------------------------------------------------------------ starting it


def serve_options() -> set[str]:
    made = click.Command("serve")
    for decorate in SERVE_OPTIONS:
        made = decorate(made)
    return {name for param in made.params if isinstance(param, click.Option) for name in [*param.opts, *param.secondary_opts]}


def commands_of(value: Any) -> Iterator[list[str]]:
    """Every list of words in a manifest that starts us, whichever way it is written."""
    if isinstance(value, dict):
        words = [*value.get("command", []), *value.get("args", [])]
        if "serve" in words or any("scripts.serve" in word for word in words):
            yield [part for word in words for part in shlex.split(word.replace("${HOSTNAME##*-}", "0"))]
        for inner in value.values():
            yield from commands_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from commands_of(inner)


def check_words(words: list[str]) -> None:
    """Options behind what starts us are ours, those in front torchrun's."""
    place = words.index("scripts.serve") if "scripts.serve" in words else words.index("serve")
    used = {word.partition("=")[0] for word in words[place:] if word.startswith("--")}
    assert used and used - serve_options() == set()
    ahead = {word for word in words[:place] if word.startswith("--")}
    assert ahead <= {"--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts"}


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.name)
def test_manifests_are_whole_and_use_options_that_there_are(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    assert all({"apiVersion", "kind", "metadata"} <= set(document) for document in documents)
    assert all("spec" in document and document["metadata"]["name"] for document in documents)
    found = list(commands_of(documents))
    assert len(found) == 1
    check_words(found[0])


def test_the_pods_are_as_many_as_torchrun_expects() -> None:
    documents = list(yaml.safe_load_all((DOCS / "deploy" / "several-nodes.yaml").read_text()))
    [words] = commands_of(documents)
    [group] = [document for document in documents if document["kind"] == "StatefulSet"]
    assert words[words.index("--nnodes") + 1] == str(group["spec"]["replicas"])
    service = {document["metadata"]["name"]: document["spec"] for document in documents if document["kind"] == "Service"}
    assert group["spec"]["serviceName"] in service and "brigade-0.brigade-group" in words


def test_the_slurm_script_is_a_script_with_options_that_there_are() -> None:
    script = DOCS / "deploy" / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    inner = re.search(r"bash -c '\n(.*?)'\n", script.read_text(), re.DOTALL)
    assert inner is not None
    check_words(shlex.split(inner[1].replace("\\\n", " ")))


def test_options_that_pages_name_are_there() -> None:
    known = {word for name in COMMANDS for word in _options(name)} | serve_options()
    known |= {"--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts", "--rdzv-backend"}
    known |= {"--nodes"}  # Slurm's
    for name in ("quickstart.md", "serving.md", "operating.md", "parameters.md", "security.md"):
        used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!--.*?-->", "", (DOCS / name).read_text())))
        assert used - known == set(), name


def _options(name: str) -> set[str]:
    command = brigade.get_command(click.Context(brigade), name)
    assert command is not None
    return {word for p in command.params if isinstance(p, click.Option) for word in [*p.opts, *p.secondary_opts]}
