"""The commands that begin with a slash."""

import shlex
from collections.abc import Callable

from ipc.errors import RequestError
from scripts.chat.session import Session

HELP = """\
/help                  this list
/reset                 forget what was said; the system message stays
/system [TEXT]         show the system message, or set it; /system - takes it away
/undo                  take the last exchange back
/save FILE             write the conversation into a new file, for brigade generate --jsonl
/params [NAME=VALUE …] show the sampling parameters, or set some; an empty value is the default (docs/sampling.md)
/quit                  leave; so does Ctrl-D, or Ctrl-C twice
A line that ends with \\ goes on in the next one. // at the beginning stands for a / that is no command.
Ctrl-C stops an answer; what was said of it stays in the conversation."""

Show = Callable[[str], None]


def run_command(line: str, session: Session, show: Show) -> bool:
    """Do what a line with a slash says; false to leave. Raises RequestError for what it can't mean."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/quit":
        return False
    command = _COMMANDS.get(name)
    if command is None:
        raise RequestError(f"{name[:40]} is not a command; /help lists them, and // begins a message with a slash")
    command(rest, session, show)
    return True


def _help(rest: str, session: Session, show: Show) -> None:
    show(HELP)


def _reset(rest: str, session: Session, show: Show) -> None:
    session.conversation.exchanges.clear()
    show("forgotten" if session.conversation.system is None else "forgotten; the system message stays")


def _system(rest: str, session: Session, show: Show) -> None:
    conversation = session.conversation
    if rest:
        conversation.system = None if rest == "-" else rest
    show("no system message" if conversation.system is None else f"system: {conversation.system}")


def _undo(rest: str, session: Session, show: Show) -> None:
    taken = session.conversation.undo()
    show("nothing was said yet" if taken is None else f"taken back: {taken}")


def _save(rest: str, session: Session, show: Show) -> None:
    if not rest:
        raise RequestError("/save needs the name of a file")
    session.conversation.save(rest, session.params)
    show(f"saved {len(session.conversation.exchanges)} exchanges in {rest}")


def _params(rest: str, session: Session, show: Show) -> None:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise RequestError(f"/params: {error}") from None
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise RequestError(f"/params: {word[:40]!r} must be NAME=VALUE")
        session.set_param(name, value)
    own = session.params.to_wire()
    show(" ".join(f"{name}={value}" for name, value in own.items()) or "all at their defaults")


_COMMANDS: dict[str, Callable[[str, Session, Show], None]] = {
    "/help": _help, "/reset": _reset, "/system": _system, "/undo": _undo, "/save": _save, "/params": _params,
}  # fmt: skip
