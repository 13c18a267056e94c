"""Around every request: the host it names, who sends it, a token for what changes something, and headers that let the
browser run only what this server sent."""

from __future__ import annotations

import hmac
import inspect
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from onceward.console.access import Access, Role, User, is_loopback, local_user, names_loopback
from onceward.console.users import SESSION_SECONDS
from onceward.errors import ConfigurationError

SESSION, TOKEN = "onceward_session", "onceward_csrf"
FIELD = "csrf"
LOGIN, FILES = "/login", "/static/"
"""Paths that need no user, next to probes."""
SAFE = ("GET", "HEAD")
LARGEST = 2 * 1024 * 1024
"""Bytes of a form."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
MOST_FIELDS = 1000
UNREADABLE = "The users of this console cannot be read; its log says why."
"""Without the place of their file: people who are not logged in see it, too."""
FAILURES, WINDOW = 5, 60.0
"""Wrong passwords for a name, or from an address, within so many seconds; then both have to wait. One that is still
being checked counts."""

_log = logging.getLogger("onceward.run")

Call = Callable[[Request], Awaitable[Response]]


class ConsoleGuard:
    """Call `answer` for each request. It puts the user into `request.state.user`."""

    def __init__(self, access: Access, probes: frozenset[str]) -> None:
        self._access = access
        self._open = probes | {LOGIN}
        self._failures: dict[str, deque[float]] = {}
        self._ended: dict[str, float] = {}
        """Sessions that somebody logged out of, and when they would have expired."""

    async def answer(self, request: Request, call: Call) -> Response:
        response = await self._refuse(request)
        if response is None:
            response = await call(request)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers.setdefault("Cache-Control", "no-store")
        token: str | None = getattr(request.state, "new_token", None)
        if token is not None:
            self._set_cookie(request, response, TOKEN, token, None)
        return response

    async def _refuse(self, request: Request) -> Response | None:
        """Return why not; None to go on."""
        path = path_of(request)
        is_local = is_loopback(client_of(request)) and names_loopback(request.headers.get("host", ""))
        if self._access.is_open and not is_local:
            return PlainTextResponse(
                "This console knows no users, so it answers this machine alone, under localhost or 127.0.0.1.\n",
                403,
            )
        self._give_token(request)
        try:
            request.state.user = user = await self._user(request)
        except ConfigurationError as error:
            _log.error("%s", error)
            return PlainTextResponse(f"{UNREADABLE}\n", 503)
        if user is None and path not in self._open and not path.startswith(FILES):
            return self._ask_to_log_in(request)
        if request.method not in SAFE:
            return await self._refuse_change(request)
        return None

    # ── who ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _user(self, request: Request) -> User | None:
        access = self._access
        if access.is_open:
            return local_user()
        if access.users is not None:
            session = request.cookies.get(SESSION)
            return (
                None
                if session is None or session in self._ended
                else await run_in_threadpool(access.users.user_of, session)
            )
        if access.authenticate is not None:
            found = access.authenticate(request)
            return await found if inspect.isawaitable(found) else found
        names, roles = (
            request.headers.getlist(each) if each else [] for each in (access.header, access.role_header)
        )
        name = names[0].strip() if len(names) == 1 else ""  # a second one: the client sent it, too
        if not name or len(roles) > 1 or not access.is_trusted_proxy(peer_of(request)):
            return None
        role = roles[0].strip() if roles else ""
        return User(name[:64], Role.__members__.get(role.upper(), Role.VIEWER))

    def _ask_to_log_in(self, request: Request) -> Response:
        if self._access.users is None:
            return PlainTextResponse("You are not a user of this console.\n", 401)
        if request.method in SAFE and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{request.scope.get('root_path', '')}/login", 303)
        return PlainTextResponse("Log in first.\n", 401)

    async def log_in(self, request: Request, name: str, password: str) -> Response | str:
        """Return the way in, or why not."""
        users = self._access.users
        if users is None:
            return "this console has no users of its own"
        keys = (f"name {name[:64]}", f"address {client_of(request)}")
        if wait := max(map(self._wait, keys)):
            return f"too many wrong passwords; try again in {wait:.0f} s"
        self._forget_old()
        began = time.monotonic()
        for key in keys:  # before it is checked: others arrive meanwhile
            self._failures.setdefault(key, deque(maxlen=FAILURES)).append(began)
        try:
            user = await run_in_threadpool(users.check, name, password)
        except ConfigurationError as error:
            _log.error("%s", error)
            self._forget(keys, began)
            return UNREADABLE
        if user is None:
            return "name or password is wrong"
        self._forget(keys, began)
        response = RedirectResponse(f"{request.scope.get('root_path', '')}/", 303)
        session = await run_in_threadpool(users.session, user)
        self._set_cookie(request, response, SESSION, session, int(SESSION_SECONDS))
        return response

    def log_out(self, request: Request) -> Response:
        now = time.monotonic()
        self._ended = {each: until for each, until in self._ended.items() if until > now}
        if request.state.user is not None and SESSION in request.cookies:
            self._ended[request.cookies[SESSION]] = now + SESSION_SECONDS
        response = RedirectResponse(f"{request.scope.get('root_path', '')}/login", 303)
        response.delete_cookie(SESSION, path=_cookie_path(request), httponly=True, samesite="strict")
        return response

    def _wait(self, key: str) -> float:
        failed = self._failures.get(key)
        if failed is None or len(failed) < FAILURES:
            return 0.0
        return max(failed[0] + WINDOW - time.monotonic(), 0.0)

    def _forget(self, keys: Iterable[str], began: float) -> None:
        """This try was no wrong password."""
        for key in keys:
            failed = self._failures.get(key, ())
            if began in failed:
                self._failures[key] = deque((each for each in failed if each != began), FAILURES)
                if not self._failures[key]:
                    del self._failures[key]

    def _forget_old(self) -> None:
        oldest = time.monotonic() - WINDOW
        for key in [key for key, failed in self._failures.items() if failed[-1] < oldest]:
            del self._failures[key]

    # ── what changes something ──────────────────────────────────────────────────────────────────────────

    def _give_token(self, request: Request) -> None:
        token = request.cookies.get(TOKEN, "")
        if len(token) != 64:
            token = request.state.new_token = secrets.token_hex(32)
        request.state.token = token

    async def _refuse_change(self, request: Request) -> Response | None:
        """The form was made by this server for this browser, and sent by a page of this server."""
        size = request.headers.get("content-length", "")
        if not _is_number(size) or int(size) > LARGEST:
            return PlainTextResponse(f"A form has a length, and at most {LARGEST:,} bytes.\n", 413)
        host = request.headers.get("host", "")
        origin = request.headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != host
        if foreign or request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return PlainTextResponse(
                "This form was sent by another site, or a proxy changed the Host header; it has to pass it on.\n",
                403,
            )
        body = (await request.body()).decode("utf-8", "replace")
        try:
            request.state.form = form = dict(
                parse_qsl(body, keep_blank_values=True, max_num_fields=MOST_FIELDS)
            )
        except ValueError:
            return PlainTextResponse(f"A form has at most {MOST_FIELDS:,} fields.\n", 413)
        sent, known = form.get(FIELD, ""), request.cookies.get(TOKEN, "")
        if not known or not hmac.compare_digest(sent.encode(), known.encode()):
            return PlainTextResponse(
                "This form is not from this console, or is too old. Go back and reload.\n", 403
            )
        return None

    def _set_cookie(
        self, request: Request, response: Response, name: str, value: str, seconds: int | None
    ) -> None:
        response.set_cookie(
            name,
            value,
            max_age=seconds,
            path=_cookie_path(request),
            secure="https" in (request.url.scheme, _forwarded_scheme(request)),
            httponly=True,
            samesite="strict",
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _forwarded_scheme(request: Request) -> str:
    """How the browser reached the first of the proxies."""
    return request.headers.get("x-forwarded-proto", "").partition(",")[0].strip()


def allow(request: Request, role: Role) -> bool:
    user: Any = getattr(request.state, "user", None)
    return user is not None and user.role >= role


def peer_of(request: Request) -> str:
    """The address that the connection comes from."""
    return request.client.host if request.client is not None else ""


def client_of(request: Request) -> str:
    """The address of the browser: a proxy on this machine names it last, and from others it would be a claim."""
    forwarded = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    peer = peer_of(request)
    return forwarded if forwarded and is_loopback(peer) else peer


def path_of(request: Request) -> str:
    """The path inside the console, wherever it is mounted."""
    root = request.scope.get("root_path", "")
    return str(request.scope["path"]).removeprefix(root) or "/"


def _cookie_path(request: Request) -> str:
    return f"{request.scope.get('root_path', '')}/"
