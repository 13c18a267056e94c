"""The console as one ASGI application, and its server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from hashlib import sha256
from typing import Any

from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from onceward._environment import names_production
from onceward.app.app import Onceward
from onceward.connectors.reports import ServerUnreachable
from onceward.console import boundaries, consumers, effects, letters, limits, overview, records, workers
from onceward.console.access import Access, Role, is_loopback
from onceward.console.backstage import Backstage
from onceward.console.guard import ConsoleGuard, allow
from onceward.console.look import HERE, environment
from onceward.db.errors import LockTimeoutError
from onceward.deadletters import EditRefusedError, RedriveRefusedError
from onceward.errors import ConfigurationError, NotFoundError, OncewardError
from onceward.run.health.pages import verdict
from onceward.run.health.probes import ByPath, HealthPage, Probes
from onceward.run.health.series import TYPE, Series
from onceward.storage.database import MissingTablesError
from onceward.telemetry.redaction import redact

FOLDER = HERE / "static"
KEPT = "max-age=31536000, immutable"
NOTES = {
    "edited": "The corrected payload is stored. The next redrive delivers it.",
    "effect": "The answer is recorded. Redrive the letter, and its handler goes on from there.",
    "hold": "{} now held.",
    "release": "{} released.",
    "discard": "{} discarded.",
    "held": "Nothing was discarded: {} on hold. Release what should be discarded.",
    "not_held": "Nothing was released: nothing of this was on hold.",
    "retry": "The message is tried again now.",
    "stop": "The redrive is stopped: {} open again.",
    "pause": "It is paused. Running processes notice within two seconds, and finish the messages they have started.",
    "pause_again": "It was paused already. Your name and reason replace the earlier ones, which the audit log keeps.",
    "paused_already": "It was paused already, by you and with this reason. Nothing was changed.",
    "resume": "It is resumed. Running processes notice within two seconds.",
    "check_busy": "Another check is running: one at a time, because each reads all messages. Try again in a moment.",
    "check_fresh": "The last check is recent enough; its verdict and its time are below.",
    "check_long": "The check takes a while. Its verdict will be below; reload this page in a moment.",
    "end": "The process was asked to end, and another one replaces it. Unfinished messages are delivered again.",
    "end_gone": "Nothing was done: that process has already ended, and another one may have replaced it.",
    "end_stopping": "Nothing was done: the whole run is stopping, and will end this process.",
    "end_under_way": "That process is already ending.",
    "nothing": "Nothing was changed: another operator was first.",
}
"""What an action says on the page that follows it."""


NO_TABLES = (
    "The database does not have all of onceward's tables that this release needs. The workers create them when they "
    "start with `onceward run`; `onceward inbox migrate` creates them without workers."
)
LOCKED = (
    "Another transaction has locked the database, and this page did not wait longer. Nothing was changed. The overview "
    "says which handler may hold it; try again when it has ended."
)


class Console:
    """What the views share."""

    def __init__(self, backstage: Backstage, guard: ConsoleGuard, access: Access) -> None:
        self.backstage = backstage
        self.guard = guard
        self.access = access
        self.stopping = asyncio.Event()
        self.live = 0
        """Pages that keep themselves current."""
        self._templates = environment()

    def render(self, request: Request, template: str, /, **values: Any) -> str:
        root = request.scope.get("root_path", "")

        def at(path: str) -> str:
            return f"{root}{path}"

        def asset(name: str) -> str:
            return at(f"/static/{name}?v={version()}")

        user = getattr(request.state, "user", None)
        common = {
            "app_name": self.backstage.app.name,
            "asset": asset,
            "at": at,
            "csrf": request.state.token,
            "env": self.backstage.app.settings.env,
            "has_database": self.backstage.has_database,
            "named": self.backstage.name_of,
            "may_log_out": self.access.users is not None,
            "note": _note(request.query_params.get("note", "")),
            "path": str(request.scope["path"]).removeprefix(root),
            "posted": request.method == "POST",
            "Role": Role,
            "user": user,
        }
        return self._templates.get_template(template).render(**common, **values)

    def page(self, request: Request, template: str, code: int = 200, /, **values: Any) -> Response:
        return HTMLResponse(self.render(request, template, **values), code)

    def go(self, request: Request, path: str, note: str = "") -> Response:
        """Show another page, after something was done."""
        after = f"?note={note}" if note else ""
        return RedirectResponse(f"{request.scope.get('root_path', '')}{path}{after}", 303)

    def refuse(self, request: Request, role: Role) -> Response:
        text = f"This needs the role {role.name.lower()}; you are {request.state.user.role.name.lower()}."
        return self.page(request, "message.html", 403, title="Not allowed", text=text)


def _note(given: str) -> str | None:
    """Only what an action of ours says, and a number: the address bar is anybody's."""
    name, _, number = given.partition(":")
    if name not in NOTES or (number and not number.isdigit()):
        return None
    return NOTES[name].format(
        f"{int(number):,} {'letter is' if number == '1' else 'letters are'}" if number else ""
    )


def create(
    app: Onceward,
    *,
    access: Access | None = None,
    redact: Sequence[str] = (),
    trace_url: str | None = None,
    backstage: Backstage | None = None,
    probes: ByPath | None = None,
    open_probes: bool = False,
) -> Starlette:
    """Return the console of an app, to serve or to mount: `web.mount("/ops", onceward.console.create(app))`.

    Without `access` it answers only requests from this machine, and refuses to be made in production. `redact` adds
    names or paths of payload fields to hide. `trace_url` is a link with `{trace_id}` in it. `/livez` and `/readyz` need
    no user; `/progress` and `/metrics` do, unless `open_probes` is set.
    """
    access = access or Access()
    if access.is_open and backstage is None and names_production(app.settings.env):
        raise ConfigurationError(
            "a console in production needs users: onceward.console.create(app, access=Access(users=UsersFile(…))), a "
            "proxy's header, or a callable"
        )
    rules = (*redact, *app.settings.console_redact)
    stage = backstage or Backstage(app, redact=rules, trace_url=trace_url or app.settings.console_trace_url)
    pages = own_pages(stage) if probes is None else probes
    guard = ConsoleGuard(access, frozenset(pages if open_probes else ("/livez", "/readyz")))
    console = Console(stage, guard, access)

    async def begin(request: Request, call: Any) -> Response:
        stage.start()
        return await guard.answer(request, call)

    site = Starlette(
        routes=[
            *_routes(),
            *(Route(path, Probes(pages)) for path in pages),
            Mount("/static", Assets()),
        ],
        exception_handlers={
            OncewardError: _explain,
            SQLAlchemyError: _explain_database,
            404: _not_found,
            500: _explain,
        },
    )
    site.router.redirect_slashes = False  # it would name the host, and the scheme behind a proxy
    site.add_middleware(BaseHTTPMiddleware, dispatch=begin)
    site.state.console = console
    return site


def _routes() -> list[Route]:
    get, post = ["GET"], ["POST"]
    return [
        Route("/", overview.overview, methods=get),
        Route("/events", overview.events, methods=get),
        Route("/consumers/{name}", consumers.consumer, methods=get),
        Route("/consumers/{name}/check", consumers.check, methods=post),
        Route("/consumers/{name}/pause", consumers.pause, methods=post),
        Route("/consumers/{name}/resume", consumers.resume, methods=post),
        Route("/workers/{number:int}/end", workers.end, methods=[*get, *post]),
        Route("/limits", limits.limits, methods=get),
        Route("/letters", letters.groups, methods=get),
        Route("/letters/group", letters.group, methods=get),
        Route("/letters/dry-run", letters.dry_run, methods=post),
        Route("/letters/redrive", letters.redrive, methods=post),
        Route("/letters/{id:int}", letters.letter, methods=[*get, *post]),
        Route("/letters/{id:int}/edit", letters.edit, methods=[*get, *post]),
        Route("/letters/{id:int}/effect", effects.answer, methods=post),
        *(
            Route(f"/letters/{action}", _acting(action), methods=post)
            for action in ("hold", "release", "discard")
        ),
        Route("/redrives", letters.redrives, methods=get),
        Route("/redrives/{id}", letters.one_redrive, methods=get),
        Route("/redrives/{id}/stop", letters.stop_redrive, methods=post),
        Route("/outbox", records.outbox, methods=get),
        Route("/outbox/retry", records.retry, methods=post),
        Route("/audit", records.audit, methods=get),
        Route("/boundary", boundaries.boundaries, methods=get),
        Route("/search", records.search, methods=get),
        Route("/login", _login, methods=[*get, *post]),
        Route("/logout", _logout, methods=post),
    ]


def _acting(action: str) -> Any:
    async def act(request: Request) -> Response:
        request.path_params["action"] = action
        return await letters.act(request)

    return act


async def _login(request: Request) -> Response:
    console: Console = request.app.state.console
    problem, name = None, ""
    if request.method == "POST":
        form = request.state.form
        name = str(form.get("name", ""))[:64]
        answer = await console.guard.log_in(request, name, str(form.get("password", ""))[:1000])
        if isinstance(answer, Response):
            return answer
        problem = answer
    status = 200 if problem is None else 429 if "too many" in problem else 401
    return console.page(request, "login.html", status, problem=problem, name=name)


async def _logout(request: Request) -> Response:
    console: Console = request.app.state.console
    return console.guard.log_out(request)


def own_pages(stage: Backstage) -> ByPath:
    """The pages for machines of a console without workers: what it reads itself from the sources and the database."""
    series = Series(None, stage.samples)

    def ready() -> HealthPage:
        problem = stage.samples.database.problem
        return verdict([] if problem is None else [problem])

    return {
        "/livez": lambda: verdict([]),
        "/readyz": ready,
        "/metrics": lambda: HealthPage(200, TYPE, series.page()),
    }


# ── the files that pages need ───────────────────────────────────────────────────────────────────────────


class Assets(StaticFiles):
    """A browser keeps them, so a page works although the server dies while it opens."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, *args: Any
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, *args)
        if scope["query_string"] == f"v={version()}".encode():
            response.headers["Cache-Control"] = KEPT
        return response


@cache
def version() -> str:
    """Changes with any of them. Pages ask for files of their version."""
    digest = sha256()
    for each in sorted(FOLDER.iterdir()):
        digest.update(each.read_bytes())
    return digest.hexdigest()[:12]


# ── what went wrong ─────────────────────────────────────────────────────────────────────────────────────


async def _explain(request: Request, error: Exception) -> Response:
    console: Console = request.app.state.console
    if isinstance(error, ServerUnreachable):
        return console.page(request, "message.html", 503, title="No answer", text=str(error))
    if isinstance(error, MissingTablesError):
        return console.page(request, "message.html", 503, title="Nothing here yet", text=NO_TABLES)
    if isinstance(error, LockTimeoutError):
        return console.page(request, "message.html", 503, title="The database is locked", text=LOCKED)
    if isinstance(error, (RedriveRefusedError, EditRefusedError)):
        return console.page(request, "message.html", 409, title="Refused", text=redact(str(error)))
    if isinstance(error, NotFoundError):
        return console.page(request, "message.html", 404, title="Not found", text=redact(str(error)))
    if isinstance(error, OncewardError):
        return console.page(
            request, "message.html", 400, title="This cannot be done", text=redact(str(error))
        )
    text = f"The console failed: {type(error).__name__}. Its log says more."
    return console.page(request, "message.html", 500, title="Failed", text=text)


async def _explain_database(request: Request, error: Exception) -> Response:
    from onceward._text import driver_message

    console: Console = request.app.state.console
    with suppress(SQLAlchemyError, OncewardError):
        if await run_in_threadpool(console.backstage.lacks_tables):
            return await _explain(request, MissingTablesError())
    text = f"The database does not answer: {driver_message(error)}"
    return console.page(request, "message.html", 503, title="No answer", text=text)


async def _not_found(request: Request, error: Exception) -> Response:
    console: Console = request.app.state.console
    if not hasattr(request.state, "token") or not allow(request, Role.VIEWER):
        return Response("not found\n", 404, media_type="text/plain")
    text = "There is no such page. It may have been removed, or the address is mistyped."
    return console.page(request, "message.html", 404, title="Not found", text=text)


# ── its server ──────────────────────────────────────────────────────────────────────────────────────────


def check_address(host: str, access: Access) -> None:
    """Refuse to serve everybody without knowing who they are."""
    if access.is_open and not is_loopback(host):
        raise ConfigurationError(
            f"the console would be open to everyone who can reach {host}: name a users file with --users FILE (add a "
            "user with `onceward console --add-user NAME --users FILE`), a proxy with --user-header and --proxy, or "
            "use 127.0.0.1"
        )


@asynccontextmanager
async def serve(site: Starlette, host: str, port: int, option: str) -> AsyncIterator[str]:
    """Serve inside the block; yields the URL."""
    from onceward.run.health import server

    console: Console = site.state.console
    console.backstage.start()
    try:
        async with server.serve(site, host, port, option) as url:
            try:
                yield url
            finally:
                console.stopping.set()
    finally:
        console.backstage.stop()
