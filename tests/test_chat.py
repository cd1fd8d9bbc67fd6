"""Is `brigade chat` what people expect of a chat in a terminal, and of a filter without one?"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import AbortRequest, AddRequest
from scripts.chat.conversation import Conversation
from tests.engine.test_client import BOS, EOS, TURN, fake, ids
from tests.fake_core import FakeCore, Reply, say, stay_silent
from tests.terminal import CTRL_C, CTRL_D, ROOT, Terminal

LIMIT = 200


def capitals(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """Answers with what stands in the last turn, in capitals."""
    say([*ids(turns_of(request)[-1].upper()), EOS], "stop")(core, client, request)


def turns_of(request: AddRequest) -> list[str]:
    """The turns of a prompt; the last one is empty, for the answer, and left out."""
    turns: list[bytearray] = []
    for token in request.prompt_token_ids.tolist():
        if token == TURN:
            turns.append(bytearray())
        elif token != BOS:
            turns[-1].append(token - 3)
    return [turn.decode() for turn in turns[:-1]]


def one_word(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """Begins and never ends."""
    core.output(client, request.request_id, ids("well"), num_prompt_tokens=len(request.prompt_token_ids), num_output_tokens=4)


def second_word(core: FakeCore, client: bytes, request: AddRequest) -> None:
    """Ends what another core began."""
    if request.output_token_ids.size:
        tokens = [*ids(" done"), EOS]
        core.output(client, request.request_id, tokens, finish_reason="stop", num_output_tokens=4 + len(tokens))
    else:
        capitals(core, client, request)


@contextmanager
def chat(*words: str, reply: Reply = capitals, env: dict[str, str] | None = None, **fields: Any) -> Iterator[tuple[FakeCore, Terminal]]:
    with fake(reply, **{"max_model_len": LIMIT, **fields}) as core, Terminal("chat", "--connect", core.address, *words, env=env) as terminal:
        yield core, terminal


def asked(core: FakeCore) -> AddRequest:
    request = core.next(AddRequest)[1]
    assert isinstance(request, AddRequest)
    return request


# ----------------------------------------------------------------------------------------------------- in a terminal


def test_a_conversation_goes_on_and_commands_change_it(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    with chat("--system", "be brief", "--temperature", "0") as (core, terminal):
        terminal.expect("fake, a context of 200 tokens")
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("HELLO\n")
        first = asked(core)
        assert turns_of(first) == ["be brief", "hello"] and first.params.temperature == 0
        terminal.type("and\\\nmore\n")
        terminal.expect("AND\nMORE\n")
        assert turns_of(asked(core)) == ["be brief", "hello", "HELLO", "and\nmore"]

        terminal.type("/undo\n")
        terminal.expect("taken back: and\nmore")
        terminal.type("/params top_k=3 stop='x y' temperature=\n")
        terminal.expect("top_k=3 stop=('x y',)")
        terminal.type("/params top_p=2\n")
        terminal.expect("top_p=2 must be above 0")
        terminal.type("/params n=2\n")
        terminal.expect("n can't be set in a chat")
        terminal.type("/fly\n")
        terminal.expect("/fly is not a command; /help lists them")
        terminal.type("//fly\n")
        terminal.expect("/FLY\n")
        second = asked(core)
        assert turns_of(second) == ["be brief", "hello", "HELLO", "/fly"]
        assert (second.params.top_k, second.params.stop, second.params.temperature) == (3, ("x y",), None)

        terminal.type(f"/save {file}\n")
        terminal.expect("saved 2 exchanges")
        terminal.type(f"/save {file}\n")
        terminal.expect("is there already")
        terminal.type("/system -\n")
        terminal.expect("no system message")
        terminal.type("/reset\n")
        terminal.expect("forgotten")
        terminal.type("new\n")
        terminal.expect("NEW\n")
        assert turns_of(asked(core)) == ["new"]
        leave(terminal)
        assert terminal.end()[0] == 0
    saved = json.loads(file.read_text())
    assert [m["content"] for m in saved["messages"]] == ["be brief", "hello", "HELLO", "/fly", "/FLY"]
    assert saved["params"] == {"top_k": 3, "stop": ["x y"]}


def test_ctrl_c_stops_the_answer_and_twice_at_an_empty_line_the_program() -> None:
    with chat(reply=one_word) as (core, terminal):
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("well")
        terminal.type(CTRL_C)
        terminal.expect("stopped; /undo takes the exchange back")
        begun = asked(core)
        assert core.next(AbortRequest)[1].request_id == begun.request_id
        terminal.expect("> ")
        core.reply = capitals
        terminal.type("go on\n")
        terminal.expect("GO ON\n")
        assert turns_of(asked(core)) == ["hello", "well", "go on"], "what was said before it was stopped stays"

        core.reply = stay_silent
        terminal.expect("> ")
        terminal.type("silence\n")
        asked(core)
        terminal.type(CTRL_C)
        terminal.expect("stopped before the first word; your message was taken back")
        terminal.expect("> ")

        terminal.type("half a li")
        terminal.expect("half a li")
        terminal.type(CTRL_C)
        terminal.expect("> ")
        terminal.type(CTRL_C)
        terminal.expect("Ctrl-C once more, or Ctrl-D, to leave")
        terminal.expect("> ")
        terminal.type(CTRL_C)
        code, rest = terminal.end()
        assert (code, "Traceback" in rest) == (0, False)


def test_a_full_context_says_what_to_do() -> None:
    with chat(max_model_len=40) as (core, terminal):
        terminal.expect("> ")
        terminal.type("x" * 60 + "\n")
        terminal.expect("the conversation has 63 tokens and the context holds 40. /undo takes the last exchange back, /reset begins")
        core.reply = say(ids("y" * 32), "length")
        terminal.type("short\n")
        terminal.expect("the context of 40 tokens is full: the answer was cut")
        terminal.type("/quit\n")
        assert terminal.end()[0] == 0


def test_the_conversation_outlives_the_engine() -> None:
    with chat() as (core, terminal):
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("HELLO\n")
        terminal.expect("> ")
        core.reply = one_word
        terminal.type("lost\n")
        terminal.expect("well")
        core.die()
        with fake(second_word, max_model_len=LIMIT) as other:
            restart_at(other, core.address)
            terminal.expect(" done\n")
            assert asked(other).output_token_ids.tolist() == ids("well")
            terminal.type("back?\n")
            terminal.expect("BACK?\n")
            assert turns_of(asked(other)) == ["hello", "HELLO", "lost", "well done", "back?"]
            leave(terminal)
            assert terminal.end()[0] == 0


def leave(terminal: Terminal) -> None:
    """Ctrl-D counts where a line is being read: what is typed before the prompt stands is lost with the terminal's old mode."""
    terminal.expect("> ")
    terminal.type(CTRL_D)


def restart_at(core: FakeCore, address: str) -> None:
    """Listen there as well."""
    core._post(lambda: core._router.bind(address))


def test_what_would_steer_the_terminal_is_not_passed_on() -> None:
    with chat(reply=say([*ids("a\x1b[31mb\rc"), EOS], "stop")) as (_, terminal):
        terminal.expect("> ")
        terminal.type("x\n")
        terminal.expect("a\ufffd[31mb\ufffdc\n")
        leave(terminal)
        terminal.end()


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_no_colour_where_it_is_not_wanted(env: dict[str, str]) -> None:
    with chat(env=env) as (_, terminal):
        terminal.expect("fake, a context of")
        leave(terminal)
        terminal.end()
        assert ("\x1b[2m" in terminal.raw) == (not env)


# ------------------------------------------------------------------------------------------------ without a terminal


def piped(lines: str | bytes, *words: str, reply: Reply = capitals, **fields: Any) -> tuple[subprocess.CompletedProcess[bytes], FakeCore]:
    with fake(reply, **{"max_model_len": LIMIT, **fields}) as core:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.cli", "chat", "--connect", core.address, *words], cwd=ROOT, timeout=60,
            input=lines.encode() if isinstance(lines, str) else lines, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return done, core


def test_lines_are_messages_of_one_conversation() -> None:
    done, core = piped("hello\n\n/reset\nlast", "--system", "s")
    assert (done.stdout.decode(), done.stderr.decode(), done.returncode) == ("HELLO\n/RESET\nLAST\n", "", 0)
    requests = [asked(core) for _ in range(3)]
    assert turns_of(requests[-1]) == ["s", "hello", "HELLO", "/reset", "/RESET", "last"]


def test_a_message_that_fails_leaves_the_others_their_answers() -> None:
    done, _ = piped("a\n" + "x" * 300 + "\nb\n")
    assert (done.stdout.decode(), done.returncode) == ("A\nB\n", 1)
    assert "the conversation has 307 tokens and the context holds 200" in done.stderr.decode()


def test_exit_codes_without_an_engine_and_with_bad_usage() -> None:
    def lose(core: FakeCore, client: bytes, request: AddRequest) -> None:
        core.stop_soon()

    done, _ = piped("a\n", reply=lose)
    assert done.returncode == 3 and b"is gone" in done.stderr
    done, _ = piped("a\n", "--top-p", "0")
    assert done.returncode == 2 and b"top_p=0.0 must be above 0" in done.stderr
    done, _ = piped(b"\xff\n")
    assert done.returncode == 2 and b"line 1 of the input is not UTF-8" in done.stderr


def test_undo_gives_back_what_was_said() -> None:
    conversation = Conversation(exchanges=[("a", "b")])
    assert (conversation.undo(), conversation.undo(), conversation.messages("c")) == ("a", None, [{"role": "user", "content": "c"}])
