"""How a command connects to a boundary: URL, certificates, and the message if that fails.

Uses the asyncio client, because Ctrl-C interrupts it while it waits for the other side.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from onceward.cli.exit import MISUSED, fail, option, refuse_mistakes
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from onceward.boundary import AsyncBoundaryClient
    from onceward.boundary.tls import Tls

INTERRUPTED = 130
FILES = {each: f"ONCEWARD_BOUNDARY_{each.upper()}" for each in ("ca", "cert", "key")}

Url = Annotated[str, option("URL", "URL of the boundary.", "--url", envvar="ONCEWARD_BOUNDARY_URL")]
HERE = "http://127.0.0.1:7700"
"""Where `onceward boundary serve` listens by default."""
Consumer = Annotated[
    str, option("NAME", "Consumer name that owns the cursor; must be stable across restarts.", "--consumer")
]


@contextmanager
def connect(
    url: str, as_json: bool, option: str = "--url"
) -> Iterator[tuple[AsyncBoundaryClient, asyncio.Runner]]:
    """Open a client; yields it with the runner of its calls."""
    with handle_errors(as_json), asyncio.Runner() as runner:
        client = client_for(url, option)
        try:
            yield client, runner
        finally:
            runner.run(client.close())


def client_for(url: str, option: str = "--url") -> AsyncBoundaryClient:
    """Build a client. Raises `ConfigurationError` that names the option of the URL, or the variables of TLS."""
    from onceward.boundary import AsyncBoundaryClient

    return AsyncBoundaryClient(check_url(url, option), tls=tls_for(url))


def check_url(url: str, option: str = "--url") -> str:
    from onceward.boundary.client import transport

    with name_option(option):
        return transport.check_url(url)


def tls_for(url: str) -> Tls | None:
    """The certificate files that the environment names for an https:// URL, if any."""
    from onceward.boundary.tls import Tls, client_context

    given = {each: os.environ.get(name, "") for each, name in FILES.items()}
    if not url.startswith("https://") or not any(given.values()):
        return None
    names = ", ".join(FILES.values())
    if missing := [FILES[each] for each, path in given.items() if not path]:
        raise ConfigurationError(f"set {names} together: {' and '.join(missing)} is not set")
    files = Tls(**given)
    with name_option(names):
        client_context(files)
    return files


@contextmanager
def handle_errors(
    as_json: bool, interrupted: str = "nothing is left half done, and it is safe to repeat"
) -> Iterator[None]:
    """End the command with one line that says what to do if anything goes wrong with a boundary."""
    try:
        with refuse_mistakes(as_json), require_extra(as_json):
            yield
    except OncewardError as error:
        fail(str(error), as_json)
    except KeyboardInterrupt:
        fail(f"interrupted; {interrupted}", as_json, INTERRUPTED)


@contextmanager
def name_option(option: str) -> Iterator[None]:
    """Name the option, or the variables, that an error is about."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{option}: {error}") from None


@contextmanager
def require_extra(as_json: bool) -> Iterator[None]:
    """Wrap imports that need the extra: say what to install if it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "onceward":
            raise
        fail(f"a boundary needs {library}: pip install 'onceward[boundary]'", as_json, MISUSED)
