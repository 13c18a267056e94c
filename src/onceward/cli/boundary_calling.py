"""How a command gets at a boundary: its URL, and what it says when that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from onceward.cli.database import MISUSED, fail

if TYPE_CHECKING:
    from onceward.boundary import BoundaryClient
    from onceward.boundary.tls import Tls

INTERRUPTED = 130

Url = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="ONCEWARD_BOUNDARY_URL", help="Where the boundary is.")
]
HERE = "http://127.0.0.1:7700"
"""Where `onceward boundary serve` listens if it is not told."""
Consumer = Annotated[
    str, typer.Option("--consumer", metavar="NAME", help="Whose cursor: a name that lasts, not a session's.")
]


@contextmanager
def connected(url: str, as_json: bool) -> Iterator[BoundaryClient]:
    """A client."""
    with explained(url, as_json):
        from onceward.boundary import BoundaryClient

        with BoundaryClient(url, tls=tls_for(url)) as client:
            yield client


def tls_for(url: str) -> Tls | None:
    """For an https:// URL the files that the environment names, if it does: ONCEWARD_BOUNDARY_CA, _CERT and _KEY."""
    from onceward.boundary.tls import Tls
    from onceward.task.exceptions import ConfigurationError

    names = [f"ONCEWARD_BOUNDARY_{each}" for each in ("CA", "CERT", "KEY")]
    ca, cert, key = (os.environ.get(name) for name in names)
    if not url.startswith("https://") or not (ca or cert or key):
        return None
    if not (ca and cert and key):
        raise ConfigurationError(f"{', '.join(names)} belong together: set all of them, or none")
    return Tls(ca=ca, cert=cert, key=key)


@contextmanager
def explained(url: str, as_json: bool) -> Iterator[None]:
    """Whatever goes wrong with a boundary ends the command with one line that says what to do."""
    from onceward.task.exceptions import ConfigurationError, OncewardError

    try:
        with installed(as_json):
            yield
    except ConfigurationError as error:
        fail(f"--url: {error}", as_json, MISUSED)
    except OncewardError as error:
        fail(told(error, url), as_json)
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


def told(error: Exception, url: str) -> str:
    """What a boundary answered, or that none did: only what failed on this side has a cause on this side."""
    here = None if error.__cause__ is None else error.__cause__.__cause__
    return str(error) if here is None else unreachable(url, str(here).rpartition("): ")[2])


def unreachable(url: str, reason: object) -> str:
    return (
        f"the boundary at {url} cannot be reached: {reason}; see that it runs (`onceward boundary serve`), or mend "
        "--url"
    )
