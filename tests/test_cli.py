"""Does the command line answer, fail and end as `brigade generate --help` says?"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ipc.errors import PeerLost, RequestError
from scripts import cli, generate
from scripts.ending import end_everything
from scripts.exits import EXIT_BAD_USAGE, EXIT_INTERRUPTED, EXIT_REQUEST_FAILED

ROOT = Path(__file__).resolve().parents[1]


class EchoClient:
    """Answers with the prompt in capitals, a character a token; a prompt may name the way in which it fails."""

    instances: list["EchoClient"] = []

    def __init__(self, address: str, **keys: str | None) -> None:
        if address == "tcp://127.0.0.1:1":
            raise PeerLost(f"no engine answered at {address}")
        self.prompts: list[str] = []
        self.params: list[Any] = []
        self.num_open = 0
        self.most_open = 0
        self.instances.append(self)

    def __enter__(self) -> "EchoClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.num_open = 0

    def generate(self, prompt: str, params: Any) -> Iterator[Any]:
        if prompt == "refused":
            raise RequestError("prompt='refused' can't be sent", field="prompt")
        self.prompts.append(prompt)
        self.params.append(params)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return itertools.chain.from_iterable(self._stream(prompt, index) for index in reversed(range(params.n)))

    def _stream(self, prompt: str, index: int) -> Iterator[Any]:
        text = prompt.upper() + "!" * index
        for end in range(1, len(text) + 1):
            if prompt.startswith("break") and end == 4:
                raise RequestError("the engine broke", code="internal")
            if prompt == "lost":
                raise PeerLost("the core is gone")
            if prompt == "interrupt":
                raise KeyboardInterrupt
            finish_reason = "stop" if end == len(text) else None
            token_ids = [ord(character) for character in text[:end]]
            yield SimpleNamespace(
                delta=text[end - 1], text=text[:end], token_ids=token_ids, finish_reason=finish_reason, seed=7,
                index=index, num_new_tokens=1, logprobs=None, prompt_logprobs=None,
            )
        self.num_open -= 1


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[EchoClient]:
    monkeypatch.setattr(generate, "Client", EchoClient)
    monkeypatch.setattr(EchoClient, "instances", [])
    return EchoClient


def run(*args: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli.main, ["generate", *args], input=stdin)


def test_an_argument_is_answered_with_text(client: type[EchoClient]) -> None:
    result = run("héllo")
    assert (result.stdout, result.stderr, result.exit_code) == ("HÉLLO\n", "", 0)


def test_answers_come_in_the_order_of_arguments_then_files(client: type[EchoClient], tmp_path: Path) -> None:
    (tmp_path / "one").write_text("third\nline\n")
    result = run("first", "second", "--file", str(tmp_path / "one"))
    assert result.stdout == "FIRST\nSECOND\nTHIRD\nLINE\n"
    assert client.instances[0].prompts == ["first", "second", "third\nline"]


def test_standard_input_is_the_prompt_when_nothing_else_is_given(client: type[EchoClient]) -> None:
    assert run(stdin="a\nb\n").exit_code == 0
    assert client.instances[0].prompts == ["a\nb"]


def test_lines_makes_every_line_a_prompt(client: type[EchoClient]) -> None:
    assert run("--lines", stdin="a\n\nb\n").stdout == "A\nB\n"
    assert run("x", "--file", "-", "--lines", stdin="a\nb").stdout == "X\nA\nB\n"


def test_json_lines_carry_text_ids_and_reason(client: type[EchoClient]) -> None:
    result = run("--json", "ab", "refused", "breaks")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"index": 0, "prompt": "ab", "text": "AB", "token_ids": [65, 66], "finish_reason": "stop", "seed": 7},
        {
            "index": 1,
            "prompt": "refused",
            "error": {"code": "bad_request", "message": "prompt='refused' can't be sent", "field": "prompt"},
        },
        {"index": 2, "prompt": "breaks", "error": {"code": "internal", "message": "the engine broke", "field": None}},
    ]
    assert result.exit_code == EXIT_REQUEST_FAILED


def test_several_answers_are_told_apart(client: type[EchoClient]) -> None:
    result = run("--n", "2", "ab", "breaks", "c")
    assert result.stdout == "[0] AB\n[1] AB!\n[0] C\n[1] C!\n"
    assert result.stderr == "Error: prompt 2: the engine broke\n" and result.exit_code == EXIT_REQUEST_FAILED
    lines = [json.loads(line) for line in run("--n", "2", "--json", "ab", "breaks").stdout.splitlines()]
    assert [(line["index"], line.get("choice"), line.get("text")) for line in lines] == [(0, 0, "AB"), (0, 1, "AB!"), (1, None, None)]


def test_a_failed_request_leaves_the_others_their_answers(client: type[EchoClient]) -> None:
    result = run("one", "break", "two")
    assert result.stdout == "ONE\nBRE\nTWO\n"
    assert result.stderr == "Error: prompt 2: the engine broke\n"
    assert result.exit_code == EXIT_REQUEST_FAILED


def test_sampling_options_reach_the_engine(client: type[EchoClient]) -> None:
    numbers = ["--max-tokens", "5", "--temperature", "0.5", "--top-k", "3", "--top-p", "0.25", "--seed", "7"]
    ends = ["--ignore-eos", "--stop-token-id", "2", "--stop", "a b", "--stop", "c"]
    assert run("x", *numbers, *ends).exit_code == 0
    params = client.instances[0].params[0]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p) == (5, 0.5, 3, 0.25)
    assert (params.seed, params.ignore_eos) == (7, True)
    assert (params.stop, params.stop_token_ids) == (("a b", "c"), (2,))


def test_many_prompts_are_under_way_at_once_but_not_all(client: type[EchoClient]) -> None:
    result = run("--lines", stdin="".join(f"p{i}\n" for i in range(200)))
    assert result.stdout == "".join(f"P{i}\n" for i in range(200))
    assert client.instances[0].most_open == generate.MAX_OPEN_REQUESTS


def test_the_form_of_the_answer_comes_from_one_option(client: type[EchoClient], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "é"', encoding="utf-8")
    for args, kind, value in (
        (("--json-schema", str(schema)), "json_schema", '{"type": "integer"}'),
        (("--json-object",), "json_object", True),
        (("--regex", "a+"), "regex", "a+"),
        (("--choice", "a", "--choice", "b"), "choice", ("a", "b")),
        (("--grammar", str(grammar)), "grammar", 'start: "é"'),
    ):
        assert run("x", *args).exit_code == 0
        (params,) = client.instances[-1].params
        assert params.structured.to_wire() == {kind: value}
    assert run("x").exit_code == 0 and client.instances[-1].params[0].structured is None


@pytest.mark.parametrize(
    ("args", "stdin", "said"),
    [
        (("x", "--max-tokens", "0"), "", "max_tokens=0 must be between 1 and"),
        (("x", "--top-p", "0"), "", "top_p=0.0 must be above 0"),
        (("x", "--stop", ""), "", "stop=''"),
        (("x", "--regex", ""), "", "structured.regex is empty"),
        (("x", "--regex", "a", "--json-object"), "", "must have exactly one of"),
        (("--lines",), "\n\n", "no prompt"),
        (("--file", "-"), b"ok \xff", "-: byte 3 is not UTF-8 text"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    client: type[EchoClient], args: tuple[str, ...], stdin: str | bytes, said: str
) -> None:
    result = run(*args, stdin=stdin)
    assert result.exit_code == EXIT_BAD_USAGE
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert client.instances == []


def test_a_missing_engine_and_a_lost_one_have_their_own_code(client: type[EchoClient]) -> None:
    missing = run("x", "--connect", "tcp://127.0.0.1:1")
    assert (missing.exit_code, missing.stderr) == (3, "Error: no engine answered at tcp://127.0.0.1:1\n")
    lost = run("x", "lost")
    assert (lost.exit_code, lost.stdout, lost.stderr) == (3, "X\n", "Error: the core is gone\n")


def test_an_interrupt_ends_without_a_traceback(client: type[EchoClient]) -> None:
    result = run("interrupt")
    assert (result.exit_code, result.stderr) == (EXIT_INTERRUPTED, "")


def test_every_listed_command_has_help() -> None:
    names = list(cli.COMMANDS)
    listing = CliRunner().invoke(cli.main, ["--help"])
    assert listing.exit_code == 0
    for name in names:
        shown = CliRunner().invoke(cli.main, [name, "--help"])
        assert shown.exit_code == 0 and f" {name} " in shown.output
        assert f"  {name} " in listing.output


def test_an_unknown_command_is_named() -> None:
    result = CliRunner().invoke(cli.main, ["fly"])
    assert result.exit_code == 2 and "No such command 'fly'" in result.stderr


@pytest.mark.parametrize(("shell", "said"), [("bash", "complete -o nosort -F"), ("zsh", "#compdef brigade"), ("fish", "complete --no-files --command brigade")])
def test_completion_prints_a_script(shell: str, said: str) -> None:
    result = CliRunner().invoke(cli.main, ["completion", shell])
    assert result.exit_code == 0 and said in result.stdout and "_BRIGADE_COMPLETE" in result.stdout


def test_what_the_script_asks_for_is_answered() -> None:
    def complete(words: str) -> list[str]:
        asked = {"_BRIGADE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        result = CliRunner().invoke(cli.main, prog_name="brigade", env=asked)
        return [line.removeprefix("plain,") for line in result.stdout.splitlines()]

    assert {"serve", "chat", "generate", "top"} <= set(complete("brigade "))
    assert complete("brigade chat --top") == ["--top-k", "--top-p"]


def test_the_commands_start_without_torch() -> None:
    modules = "scripts.cli, scripts.generate, scripts.launch, scripts.show_timeline, scripts.chat.command, scripts.top.command"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60).returncode == 0


def test_a_cause_for_a_launcher_that_is_gone_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    end_everything("rank 0: whatever", str(tmp_path / "gone" / "errors"))


@pytest.mark.parametrize("name", ["generate", "timeline", "inspect"])
def test_a_command_interrupted_while_it_is_imported_ends_with_130(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    result = CliRunner().invoke(cli.main, [name, "x"])
    assert (result.exit_code, result.output) == (130, "")
