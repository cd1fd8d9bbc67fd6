"""`brigade keygen`: makes the keys with which an engine and its clients know each other."""

import re
from pathlib import Path

import click

from ipc.endpoints import make_private
from ipc.errors import ConfigError
from ipc.security import PUBLIC_SUFFIX, SECRET_SUFFIX, new_key_pair, write_key_pair
from scripts.exits import errors_told

DEFAULT_DIRECTORY = "brigade-keys"
CLIENTS = "clients"
"""Folder of public keys alone: the allow-list."""


@click.command(name="keygen", context_settings={"max_content_width": 120})
@click.argument("directory", default=DEFAULT_DIRECTORY, type=click.Path(file_okay=False, path_type=Path))
@click.option("--client", metavar="NAME", default=None, help="Make only another client's keys, beside those that are there.")
def command(directory: Path, client: str | None) -> None:
    """Make keys for an encrypted engine in DIRECTORY (by default brigade-keys), and say what to do with them.

    \b
    server.key_secret  for `brigade serve --server-key`; stays where the engine runs
    server.key         the engine's public key; every client needs it
    client.key_secret  for a client's `--client-key`; stays where that client runs
    clients/           public keys of all clients, for `brigade serve --client-keys`

    Directories get mode 0700 and files 0600. Nothing that exists is overwritten. A client is let in when its public key lies in
    the folder as the engine starts; to lock it out, delete that file and start the engine again.

    \b
    Exit codes:
      0  the keys are there
      2  a file is there already, or can't be written
    """
    with errors_told():
        name = "client" if client is None else _checked(client)
        pairs = [] if client is not None else [(directory / f"server{SECRET_SUFFIX}", directory / f"server{PUBLIC_SUFFIX}")]
        pairs.append((directory / f"{name}{SECRET_SUFFIX}", directory / CLIENTS / f"{name}{PUBLIC_SUFFIX}"))
        for file in (file for pair in pairs for file in pair):
            if file.exists() or file.is_symlink():
                raise ConfigError(str(file), "is there already, and keys are not overwritten; choose another directory or --client NAME")
        _make_folders(directory)
        for secret_file, public_file in pairs:
            write_key_pair(secret_file, public_file, new_key_pair())
        click.echo(_advice(directory, name))


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name) or name == "server":
        raise ConfigError("--client", f"{name!r:.80} must be a name of letters, digits, dots and dashes, and not server")
    return name


def _make_folders(directory: Path) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(str(directory), f"can't be made: {error.strerror}") from None
    for folder in (directory, directory / CLIENTS):
        make_private(folder, "DIRECTORY", "choose another one")


def _advice(directory: Path, name: str) -> str:
    return "\n".join([
        f"Keys are in {directory}. Start the engine with",
        f"  brigade serve MODEL --server-key {directory}/server{SECRET_SUFFIX} --client-keys {directory}/{CLIENTS}",
        f"and give the client {directory}/server{PUBLIC_SUFFIX} and, over a safe way, {directory}/{name}{SECRET_SUFFIX}:",
        f"  export BRIGADE_SERVER_KEY={directory.resolve()}/server{PUBLIC_SUFFIX} "
        f"BRIGADE_CLIENT_KEY={directory.resolve()}/{name}{SECRET_SUFFIX}",
        f"A further client: brigade keygen {directory} --client NAME, and start the engine again.",
    ])  # fmt: skip
