"""Prompts as JSON lines, answers as JSON lines, and how far it is: `brigade generate` for whole files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from scripts import cli, generate
from scripts.exits import EXIT_BAD_USAGE, EXIT_REQUEST_FAILED
from tests.engine.test_client import fake
from tests.terminal import Terminal
from tests.test_chat import capitals
from tests.test_cli import EchoClient


class ChatClient(EchoClient):
    """Answers a conversation with its last message, and ids with their number."""

    def chat(self, messages: list[dict[str, str]], params: Any) -> Iterator[Any]:
        return self.generate(messages[-1]["content"], params)

    def generate(self, prompt: Any, params: Any) -> Iterator[Any]:
        return super().generate(prompt if isinstance(prompt, str) else f"{len(prompt)} ids", params)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[EchoClient]:
    monkeypatch.setattr(generate, "Client", ChatClient)
    monkeypatch.setattr(EchoClient, "instances", [])
    return EchoClient


def run(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(cli.main, ["generate", *args], input=stdin)


LINES = [
    {"prompt": "ab", "id": "first"},
    {"messages": [{"role": "user", "content": "yo"}], "params": {"temperature": 0, "stop": ["x"], "logit_bias": {"5": 1}}, "id": 7},
    {"prompt": [1, 2, 3], "params": {"max_tokens": None}},
    {"prompt": "breaks"},
]


def test_json_lines_become_requests_and_answers(client: type[EchoClient], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, LINES)))
    result = run("--jsonl", "--json", "--file", str(tmp_path / "in.jsonl"), "--max-tokens", "5", "--temperature", "0.5")
    assert result.exit_code == EXIT_REQUEST_FAILED
    first, second, third, fourth = map(json.loads, result.stdout.splitlines())
    assert (first["index"], first["id"], first["prompt"], first["text"]) == (0, "first", "ab", "AB")
    assert (second["id"], second["messages"], second["text"]) == (7, LINES[1]["messages"], "YO")
    assert ("id" in third, third["prompt"], third["text"]) == (False, [1, 2, 3], "3 IDS")
    assert fourth["error"]["message"] == "the engine broke"
    params = client.instances[0].params
    assert [(p.temperature, p.max_tokens) for p in params] == [(0.5, 5), (0, 5), (0.5, None), (0.5, 5)]
    assert (params[1].stop, params[1].logit_bias) == (("x",), ((5, 1.0),))


def test_standard_input_and_arguments_together_with_text_out(client: type[EchoClient]) -> None:
    assert run("--jsonl", "--file", "-", "arg", stdin='{"prompt": "line"}\n').stdout == "ARG\nLINE\n"
    assert run("--jsonl", stdin='{"prompt": "line\u2028two"}\n').stdout == "LINE\u2028TWO\n"


def test_output_goes_into_a_file(client: type[EchoClient], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = run("--lines", "--output", str(out), stdin="a\nb\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0), "no bar without a terminal"
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["A", "B"]
    missing = run("x", "--output", str(tmp_path / "no" / "out"))
    assert missing.exit_code == EXIT_BAD_USAGE and "Error:" in missing.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "-:2: is not JSON"),
        ("[1]", "-:2: must be an object with prompt or messages, got list"),
        ("{}", "-:2: must have either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "-:2: must have either"),
        ('{"prompt": 5}', "-:2: prompt=5 must be a text or a list of token ids"),
        ('{"messages": "hi"}', "-:2: messages='hi' must be a list"),
        ('{"prompt": "a", "temperature": 1}', "-:2: 'temperature' is not known; an object has id, messages, params, prompt"),
        ('{"prompt": "a", "id": 1.5}', "-:2: id=1.5 must be a text or an integer"),
        ('{"prompt": "a", "params": [1]}', "-:2: params=[1] must be an object"),
        ('{"prompt": "a", "params": {"warmth": 1}}', "-:2: params.warmth is not a sampling parameter"),
        ('{"prompt": "a", "params": {"top_p": 0}}', "-:2: top_p=0 must be above 0"),
        ('{"prompt": "a", "params": {"logit_bias": {"5": 500}}}', "-:2: logit_bias[5]=500 must be between -100 and 100"),
        ('{"prompt": "a", "params": {"structured": {"json_schema": 5}}}', "-:2: structured.json_schema=5 must be text or an object"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(client: type[EchoClient], line: str, said: str) -> None:
    result = run("--jsonl", stdin='{"prompt": "fine"}\n' + line + "\n")
    assert result.exit_code == EXIT_BAD_USAGE and result.stdout == ""
    assert said in result.stderr and len(result.stderr.splitlines()) == 1
    assert client.instances == []


def test_two_ways_to_read_a_line_are_one_too_many(client: type[EchoClient]) -> None:
    assert "--lines and --jsonl" in run("--lines", "--jsonl", stdin="a").stderr


def test_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    conversation = [{"role": "user", "content": "hi"}]
    (tmp_path / "in.jsonl").write_text("\n".join([json.dumps({"messages": conversation})] * 3))
    with fake(capitals) as core, Terminal(
        "generate", "--connect", core.address, "--jsonl", "--file", str(tmp_path / "in.jsonl"), "--output", str(out)
    ) as terminal:  # fmt: skip
        code, said = terminal.end()
    assert code == 0 and "3/3" in said and "tokens/s" in said
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == ["HI"] * 3
