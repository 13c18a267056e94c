"""How a command gets at a boundary: its URL, its certificates, and what it says when that fails.

With the client for asyncio, because Ctrl-C gets through to it while it waits for the other side.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from onceward.cli.exit import MISUSED, fail

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient
    from onceward.boundary.tls import Tls

INTERRUPTED = 130
FILES = {each: f"ONCEWARD_BOUNDARY_{each.upper()}" for each in ("ca", "cert", "key")}

Url = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="ONCEWARD_BOUNDARY_URL", help="Where the boundary is.")
]
HERE = "http://127.0.0.1:7700"
"""Where `onceward boundary serve` listens if it is not told."""
Consumer = Annotated[
    str, typer.Option("--consumer", metavar="NAME", help="Whose cursor: a name that lasts, not a session's.")
]


@contextmanager
def connected(
    url: str, as_json: bool, option: str = "--url"
) -> Iterator[tuple[AsyncBoundaryClient, asyncio.Runner]]:
    """A client, and what runs its calls."""
    with explained(as_json), asyncio.Runner() as runner:
        client = client_for(url, option)
        try:
            yield client, runner
        finally:
            runner.run(client.close())


def client_for(url: str, option: str = "--url") -> AsyncBoundaryClient:
    """Raises `ConfigurationError`, with the name of what is wrong: the option of the URL, or the variables of TLS."""
    from onceward.boundary import AsyncBoundaryClient

    return AsyncBoundaryClient(checked(url, option), tls=tls_for(url))


def checked(url: str, option: str = "--url") -> str:
    from onceward.boundary.client.transport import check_url
    from onceward.errors import ConfigurationError

    try:
        return check_url(url)
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None


def tls_for(url: str) -> Tls | None:
    """For an https:// URL the files that the environment names, if it does."""
    from onceward.boundary.tls import Tls, client_context
    from onceward.errors import ConfigurationError

    given = {each: os.environ.get(name, "") for each, name in FILES.items()}
    if not url.startswith("https://") or not any(given.values()):
        return None
    names = ", ".join(FILES.values())
    if missing := [FILES[each] for each, path in given.items() if not path]:
        raise ConfigurationError(f"{names} belong together: {' and '.join(missing)} is not set")
    files = Tls(**given)
    try:
        client_context(files)
    except ConfigurationError as error:
        raise ConfigurationError(f"{names}: {error}") from None
    return files


@contextmanager
def explained(as_json: bool) -> Iterator[None]:
    """Whatever goes wrong with a boundary ends the command with one line that says what to do."""
    from onceward.errors import ConfigurationError, OncewardError

    try:
        with installed(as_json):
            yield
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    except OncewardError as error:
        fail(str(error), as_json)
    except KeyboardInterrupt:
        fail("interrupted; nothing is half done, and it is safe to repeat", as_json, INTERRUPTED)


@contextmanager
def installed(as_json: bool) -> Iterator[None]:
    """For the imports of what needs the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "onceward":
            raise
        fail(f"a boundary needs {library}: pip install 'onceward[boundary]'", as_json, MISUSED)
