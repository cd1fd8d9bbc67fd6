"""How does `brigade chat` begin, go on and end?"""

import sys
from typing import Any

import click

from engine import Client
from ipc.conversation import ATTACH_TIMEOUT_S
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import PeerLost, RequestError
from scripts.chat.conversation import Conversation
from scripts.chat.prompt import Prompt
from scripts.chat.session import NOT_IN_CHAT, Outcome, Session
from scripts.chat.slash import run_command
from scripts.exits import EXIT_REQUEST_FAILED, errors_told
from scripts.options import GroupedCommand, client_key_options
from scripts.sampling_options import sampling_options, sampling_values
from scripts.terminal_text import dim


@click.command(name="chat", cls=GroupedCommand, context_settings={"max_content_width": 120})
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="Address of the engine.")
@client_key_options
@click.option("--system", metavar="TEXT", help="The system message: what the model is to be or to heed.")
@sampling_options(without=NOT_IN_CHAT)
def command(connect: str, server_key: str | None, client_key: str | None, system: str | None, **sampling: Any) -> None:
    """Talk with the model of a running engine.

    In a terminal: Ctrl-C stops an answer; at an empty line twice in a row, or Ctrl-D, leaves. /help lists what else there is.
    When the engine goes away the conversation stays, and the next message looks for it again.

    When standard input or output is no terminal each line of the input that is not empty is a message of the same
    conversation, and its answer is printed with a newline behind it. Nothing in it is a command.

    \b
    Exit codes:
      0    left, or every message was answered
      1    a message failed; the others were answered (not in a terminal)
      2    an option, or the input, can't be used
      3    no engine at the address, or it went away (the latter not in a terminal)
      130  interrupted (not in a terminal)
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with errors_told():
        values = sampling_values(sampling)
        reconnect_s = ATTACH_TIMEOUT_S if is_terminal else None
        with Client(connect, reconnect_s=reconnect_s, server_key=server_key, client_key=client_key) as client:
            session = Session(client, Conversation(system), values, note=_note if is_terminal else _warn)
            exit_code = _talk(session) if is_terminal else _answer_lines(session)
    sys.exit(exit_code)


def _talk(session: Session) -> int:
    model = session.client.model
    _note(f"{model.name}, a context of {model.max_model_len} tokens; /help lists what there is, Ctrl-D leaves")
    prompt = Prompt(_note)
    while (text := prompt.read()) is not None:
        try:
            if text.startswith("/") and not text.startswith("//"):
                if not run_command(text, session, _note):
                    break
            else:
                session.say(text[1:] if text.startswith("//") else text)
        except RequestError as error:
            _note(str(error))
        except PeerLost as error:
            _note(f"{error}; your message was taken back, and the next one looks for an engine again")
        except KeyboardInterrupt:
            _note("stopped; your message was taken back")
    return 0


def _answer_lines(session: Session) -> int:
    num_failed = 0
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise RequestError(f"line {number} of the input is not UTF-8 text") from None
        if text.strip():
            outcome = session.say(text)
            if outcome is Outcome.STOPPED:
                raise KeyboardInterrupt
            num_failed += outcome is Outcome.FAILED
    return EXIT_REQUEST_FAILED if num_failed else 0


def _note(text: str) -> None:
    click.echo(dim(text, sys.stdout))


def _warn(text: str) -> None:
    click.echo(f"brigade chat: {text}", err=True)
