"""How does `brigade top` choose between a live screen, one plain frame, numbers and a picture?"""

import json
import sys
import time
from pathlib import Path

import click

from ipc.conversation import ATTACH_TIMEOUT_S
from ipc.endpoints import DEFAULT_LISTEN
from ipc.errors import ConfigError
from scripts.exits import errors_told
from scripts.options import client_key_options
from scripts.top.model import History, View
from scripts.top.reading import Source

try:
    import rich
except ImportError:
    rich = None  # type: ignore[assignment]
else:
    from scripts.top.drawing import Choices, console_of, frame, write_picture
    from scripts.top.screen import Screen

LIVE_ATTACH_S = 2.0
"""Between two tries to find an engine that is away."""


@click.command(name="top")
@click.argument("address", required=False)
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="The same as ADDRESS.")
@client_key_options
@click.option("--interval", "interval_s", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, metavar="SECONDS",
              help="Time between two looks.")
@click.option("--once", is_flag=True, help="Print one plain frame and end; so it does where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as one JSON object and end.")
@click.option("--svg", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write a picture of one frame and end.")
def command(
    address: str | None, connect: str, server_key: str | None, client_key: str | None, interval_s: float, once: bool,
    as_json: bool, svg: str | None,
) -> None:  # fmt: skip
    """Watch the engine at ADDRESS: what each stage does and waits for, how fast tokens come, and who has requests open.

    Keys: q quits, r and p show or hide the requests and the pipeline. When the engine goes away the screen stays and
    looks for it again. Needs rich: pip install -e '.[ui]' in the clone (--json does not).

    \b
    Exit codes:
      0    done, or left by q or Ctrl-C
      2    an option can't be used
      3    no engine at the address (not on the live screen)
    """
    is_live = not (once or as_json or svg) and sys.stdin.isatty() and sys.stdout.isatty()
    with errors_told():
        if rich is None and not as_json:
            raise ConfigError("brigade top", "needs rich: pip install -e '.[ui]' in the clone, or take the numbers of --json")
        source = Source(
            address or connect, attach_s=LIVE_ATTACH_S if is_live else ATTACH_TIMEOUT_S,
            server_key=server_key, client_key=client_key,
        )  # fmt: skip
        if is_live:
            _watch(source, interval_s)
        else:
            _show(_look(source, interval_s), once=once, as_json=as_json, svg=svg)


def _watch(source: Source, interval_s: float) -> None:
    fault = Screen(source, interval_s, Choices()).run()
    if fault is not None:
        raise ConfigError("brigade top", fault)


def _look(source: Source, interval_s: float) -> View:
    """Twice, since rates need a time that they are of."""
    history = History(source.address)
    try:
        history.view(source.read())
        time.sleep(interval_s)
        return history.view(source.read())
    finally:
        source.close()


def _show(view: View, *, once: bool, as_json: bool, svg: str | None) -> None:
    if svg is not None:
        write_picture(Path(svg), view)
    if as_json:
        click.echo(json.dumps(view.as_json(), ensure_ascii=False))
    elif once or svg is None:
        console_of(sys.stdout, is_plain=True).print(frame(view, None, Choices()))
