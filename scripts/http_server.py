"""``brigade http``: an HTTP server of its own beside a running engine; several may serve one engine."""

import asyncio
from typing import Any

import click

from engine.openai.listener import listen, url_of
from engine.openai.settings import RECONNECT_S
from ipc.conversation import ATTACH_TIMEOUT_S
from ipc.endpoints import DEFAULT_LISTEN
from ipc.logs import LEVELS, set_up_logging
from ipc.promptness import ask_for_promptness
from scripts.exits import errors_told
from scripts.options import GroupedCommand, Seconds, client_key_options, http_options, http_settings

try:
    from engine.openai.link import EngineLink
    from engine.openai.process import serve
except ImportError:
    serve = None  # type: ignore[assignment]


@click.command("http", cls=GroupedCommand, context_settings={"max_content_width": 120})
@click.option("--connect", metavar="ADDR", default=DEFAULT_LISTEN, show_default=True, help="Address of the engine.")
@client_key_options
@click.option("--http", metavar="HOST:PORT", default="127.0.0.1:8000", show_default=True,
              help="Where to serve; port 0 takes any that is free, told in the ready line.")  # fmt: skip
@http_options
@click.option("--insecure", is_flag=True, help="Allow an address that other machines can reach, without a key.")
@click.option("--reconnect-timeout", type=Seconds(1), default=RECONNECT_S, show_default=True,
              help="Seconds that open requests wait for a lost engine to be back; then they go on where they were.")  # fmt: skip
@click.option("--drain-timeout", type=Seconds(0), default=30.0, show_default=True,
              help="Seconds that open requests get to finish at shutdown.")  # fmt: skip
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True, help="How much is logged.")
def command(
    connect: str, server_key: str | None, client_key: str | None, http: str, reconnect_timeout: float, drain_timeout: float,
    log_level: str, **options: Any,
) -> None:
    """Serve a running engine over HTTP, as OpenAI's API does (docs/http.md).

    When requests are answered, a line says where: `brigade http ready: …`. SIGTERM or Ctrl-C lets open requests finish and
    ends with exit code 0; a second one stops at once. If the engine is lost, open requests wait for it and go on where they
    were, and new ones get status 503 until it is back.

    \b
    Exit codes:
      0  it was stopped
      2  an option can't be used
      3  no engine at the address
    """
    set_up_logging("http", log_level)
    with errors_told():
        settings = http_settings(http, options)
        assert settings is not None and serve is not None
        listener = listen(settings.host, settings.port)
        url = url_of(listener)
        ask_for_promptness()
        asyncio.run(serve(
            settings, EngineLink(connect, server_key, client_key, reconnect_s=reconnect_timeout), listener,
            drain_timeout_s=drain_timeout, attach_timeout_s=ATTACH_TIMEOUT_S,
            on_up=lambda: click.echo(f"brigade http ready: connect={connect} http={url}", err=True),
        ))  # fmt: skip
