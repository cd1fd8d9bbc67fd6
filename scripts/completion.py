"""`brigade completion SHELL`: the script that lets a shell complete the commands and options of `brigade`."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")

VARIABLE = "_BRIGADE_COMPLETE"
"""With it set, `brigade` itself tells what may come next."""


@click.command(name="completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that makes SHELL complete `brigade`.

    \b
    bash   brigade completion bash >> ~/.bashrc        (bash 4.4 or newer)
    zsh    brigade completion zsh >> ~/.zshrc
    fish   brigade completion fish > ~/.config/fish/completions/brigade.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "brigade", VARIABLE).source())
