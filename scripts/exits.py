"""How the commands that talk to an engine end: one meaning for each exit code, and one way to tell an error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ipc.errors import ConfigError, PeerLost, RequestError

EXIT_REQUEST_FAILED = 1
EXIT_BAD_USAGE = 2
EXIT_ENGINE_LOST = 3
EXIT_INTERRUPTED = 130


@contextmanager
def errors_told() -> Iterator[None]:
    """End the process with a line on standard error and an exit code if what is done in here can't be. Ctrl-C included."""
    try:
        yield
    except (PeerLost, ConfigError, RequestError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(EXIT_ENGINE_LOST if isinstance(error, PeerLost) else EXIT_BAD_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
