"""Which commands `brigade` has, and where each of them lives."""

import importlib
from typing import Any

import click

from scripts.exits import EXIT_INTERRUPTED

COMMANDS = {
    "serve": "scripts.launch",
    "http": "scripts.http_server",
    "generate": "scripts.generate",
    "chat": "scripts.chat.command",
    "inspect": "scripts.inspect_model",
    "bench": "scripts.bench.command",
    "top": "scripts.top.command",
    "timeline": "scripts.show_timeline",
    "keygen": "scripts.keygen",
    "completion": "scripts.completion",
}
"""Command name to module; the module calls its click command ``command``."""


class _LazyGroup(click.Group):
    """Imports a command's module when that command is asked for, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. One that is interrupted where it has no words of its own for it, as while it is imported, ends
        with the exit code that all of them have for that."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="brigade", prog_name="brigade")
def main() -> None:
    """Serve a language model that is spread over a line of worker processes, and talk to it."""


if __name__ == "__main__":
    main()
