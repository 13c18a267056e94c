"""`onceward console`: the operators' web page of an app."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from onceward._secrets import mask_url
from onceward.cli.exit import MISUSED, argument, fail, option, refuse_mistakes
from onceward.cli.output import echo
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.console.access import Access

CONSOLE_EXAMPLES = """
Examples:

- `onceward console shop:app` for a browser on this machine

- `onceward console shop:app --run http://127.0.0.1:8080` to show the state of a run, too

- `onceward console --add-user ann --role operator --users users.txt` asks for a password

- `onceward console shop:app --listen 0.0.0.0:8090 --users users.txt` for others, behind a proxy with TLS
"""
LISTEN = "127.0.0.1:8090"

Listen = Annotated[str, option("HOST:PORT", "Where to serve; an address that others can reach needs users.")]
Users = Annotated[
    Path | None, option("FILE", "Users with hashed passwords, one per line.", show_default="none")
]
UserHeader = Annotated[str | None, option("NAME", "Header with the user's name, set by a trusted proxy.")]
RoleHeader = Annotated[
    str | None, option("NAME", "Header with the role, set by the same proxy.", show_default="viewer")
]
Proxy = Annotated[
    list[str] | None, option("ADDRESS", "Address or network of a trusted proxy; may be repeated.")
]


def console(
    app: Annotated[str | None, argument("MODULE:APP", "The app, as in shop:app.", show_default=False)] = None,
    listen: Listen = LISTEN,
    users: Users = None,
    user_header: UserHeader = None,
    role_header: RoleHeader = None,
    proxy: Proxy = None,
    run: Annotated[
        list[str] | None, option("URL", "Health address of a run whose state to show; may be repeated.")
    ] = None,
    add_user: Annotated[
        str | None, option("NAME", "Add a user to the file, or change one; asks for the password.")
    ] = None,
    role: Annotated[str, option("NAME", "Role of the added user: viewer, operator or admin.")] = "viewer",
) -> None:
    """Serve the console of an app: what runs, what waits, what died, and what to do about it.

    Without users it answers only on this machine. A viewer sees everything, with payloads redacted; an operator also
    dry-runs, redrives, edits and holds dead letters, and pauses consumers; an admin also discards letters, and sees
    whole payloads. The audit log records every action with the user's name.

    Exit code: 0 after a signal; 2 for wrong arguments, an address that is in use, or one that needs users.
    """
    with refuse_mistakes(False):
        if add_user is not None:
            _add_user(users, add_user, role)
            return
        if app is None:
            fail("name the app, as in `onceward console shop:app`", False, MISUSED)
        runs = run or []
        for each in runs:
            _check_run(each)
        _serve(app, listen, access_of(users, user_header, role_header, proxy), runs)


def access_of(
    users: Path | None, user_header: str | None, role_header: str | None, proxies: list[str] | None
) -> Access:
    from onceward.console.access import Access
    from onceward.console.users import UsersFile

    file = None if users is None else UsersFile(users)
    if file is not None:
        file.lines()  # raises if it cannot be read
    return Access(users=file, header=user_header, role_header=role_header, proxies=proxies or ())


def _add_user(users: Path | None, name: str, role: str) -> None:
    from onceward.console.access import Role
    from onceward.console.users import UsersFile

    if users is None:
        raise ConfigurationError("name the file with --users FILE")
    if role.upper() not in Role.__members__:
        raise ConfigurationError(f"--role must be viewer, operator or admin, not {role!r}")
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    UsersFile(users).add(name, password, Role[role.upper()])
    echo(f"{name} is now {role.lower()} in {users}.")


def _check_run(url: str) -> None:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigurationError(
            f"--run must be the URL of a run's --health, as in http://127.0.0.1:8080, not {mask_url(url)!r}"
        )


def _serve(target: str, listen: str, access: Access, runs: list[str]) -> NoReturn:
    from onceward.app.lookup import load_app
    from onceward.console.backstage import Backstage
    from onceward.console.site import check_address, create
    from onceward.run.health.pages import parse_address

    loaded = load_app(target)
    loaded.check()
    host, port = parse_address(listen, "--listen")
    check_address(host, access)
    settings = loaded.settings
    backstage = Backstage(
        loaded, runs=runs, redact=settings.console_redact, trace_url=settings.console_trace_url
    )
    site = create(loaded, access=access, backstage=backstage)
    asyncio.run(_until_stopped(site, host, port))
    raise typer.Exit(0)


async def _until_stopped(site: Any, host: str, port: int) -> None:
    from onceward.console.site import serve

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopped.set)
    async with serve(site, host, port, "--listen") as url:
        echo(f"The console is at {url}/ until Ctrl-C.")
        await stopped.wait()
