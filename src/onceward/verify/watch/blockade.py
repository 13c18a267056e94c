"""The blockade: a verification calls nothing outside, not even in an effect.

A hundred runs of a handler would be a hundred calls of the provider. In a child, connections and processes are refused
before they are made, except the verification's own database, what `Verification.allow` lists, and what a service in
`reads` does.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import ip_address
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import msgspec
from sqlalchemy import URL

from onceward.task.io_guard import NOT_THE_TASKS_DOING
from onceward.verify.report import Finding
from onceward.verify.watch import intrusions

PROCESSES = {"subprocess.Popen": 0, "os.system": 0, "os.exec": 0, "os.posix_spawn": 0, "os.spawn": 1}
"""Audit events, and which argument is the program."""
SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg")
LOOKUPS = ("socket.getaddrinfo", "socket.gethostbyname")
_OF_PYTHON = ("platform", "ctypes.util", "uuid")
"""Modules that start a process to find out something about the machine."""


class BlockedCallError(OSError):
    """Raised in place of a call that a verification must not make."""


class BlockedCall(msgspec.Struct, frozen=True):
    """A call that was not made."""

    effect: str | None
    target: str
    where: str
    is_process: bool = False

    def __str__(self) -> str:
        return self.describe("the consumer" if self.effect is None else f"the effect {self.effect!r}")

    def describe(self, who: str) -> str:
        at = f" at {self.where}" if self.where else ""
        verb = "start the process" if self.is_process else "call"
        return f"{who} would {verb} {self.target}{at}; the verification made no such call"

    def finding(self, consumer: str) -> Finding:
        who = f"consumer {consumer!r}" if self.effect is None else f"effect {self.effect!r} of {consumer!r}"
        inside = "Do it in session.effect(…). " if self.effect is None else ""
        text = f"{self.describe(who)}. {inside}{ADVICE}"
        if not self.is_process:
            text += f". If your own fake listens there: allow=[{self.target!r}]"
        return Finding(text, where=self.where)


ADVICE = (
    "Take the client as a service (@app.service; in a class, self.services), and replace it with a fake: "
    "Verification(services={Client: FakeClient()})"
)
seen: list[BlockedCall] = []
_effect: ContextVar[str | None] = ContextVar("onceward_effect", default=None)
_latest: str | None = None
"""The effect that is running, for code in a thread of its own, which has another context."""
_lifted = True
_hooked = False
_allowed: frozenset[tuple[str, int | None]] = frozenset()
_reads: Sequence[Any] = ()
_database: dict[str, str] = {}
_guarded = False


def install(database: URL, allow: Sequence[str], reads: Sequence[Any]) -> None:
    """Refuse outside calls of this process from now on. Objects in `reads` may call."""
    global _hooked, _lifted, _allowed, _reads
    _lifted = True
    _allowed = frozenset(target for each in allow for target in _targets(each))
    _reads = reads
    _guard_psycopg(database)
    if not _hooked:
        _hooked = True
        sys.addaudithook(_audit)
    _lifted = False


@contextmanager
def lifted() -> Iterator[None]:
    """Let the kit itself connect: it copies databases, and opens services."""
    global _lifted
    before, _lifted = _lifted, True
    try:
        yield
    finally:
        _lifted = before


@contextmanager
def in_effect(name: str) -> Iterator[None]:
    """Blame calls on this effect."""
    global _latest
    token, before, _latest = _effect.set(name), _latest, name
    try:
        yield
    finally:
        _effect.reset(token)
        _latest = before


# ── what is allowed ─────────────────────────────────────────────────────────────────────────────────────


def _targets(text: str) -> Iterator[tuple[str, int | None]]:
    """The host and port, or the path of a socket, that `allow` names; a host also by its addresses."""
    host, port = split(text)
    yield host, port
    if not host.startswith("/"):
        with suppress(OSError):
            for each in socket.getaddrinfo(host, None):
                yield str(each[4][0]), port


def split(text: str) -> tuple[str, int | None]:
    """`api.example.com:443`, `[::1]:443`, `::1`, `localhost`, a URL or `/run/fake.sock`, as host and port."""
    if "://" in text:
        text = urlsplit(text).netloc.rpartition("@")[2]
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or text.startswith("/") or (":" in host and not host.startswith("[")):
        host, port = text, ""
    return host.strip("[]"), int(port) if port else None


def _is_allowed(host: str, port: int | None) -> bool:
    return (host, None) in _allowed or (host, port) in _allowed


def _may_read(frame: FrameType | None) -> bool:
    """Whether an object that only reads makes the call, or may: a library's own thread does not know for whom."""
    if not _reads:
        return False
    known = {id(each) for each in _reads}
    has_user = False
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and id(frame.f_locals.get(code.co_varnames[0])) in known:
            return True
        has_user = has_user or intrusions.is_user_code(frame)
        frame = frame.f_back
    return not has_user and _effect.get() is None


# ── hooks ───────────────────────────────────────────────────────────────────────────────────────────────


def _audit(name: str, arguments: tuple[Any, ...]) -> None:
    if _lifted:
        return
    if name in SENDS:
        _check_address(arguments[0], arguments[1])
    elif name in LOOKUPS:
        _check_lookup(*arguments[:2])
    elif name in PROCESSES:
        _check_process(arguments[PROCESSES[name]])


def _check_address(sender: socket.socket, address: Any) -> None:
    if sender.family == socket.AF_UNIX:
        _refuse_unless_allowed(address.decode() if isinstance(address, bytes) else str(address), None)
    elif sender.family in (socket.AF_INET, socket.AF_INET6) and isinstance(address, tuple):
        _refuse_unless_allowed(str(address[0]), address[1])


def _check_lookup(host: Any, port: Any = None) -> None:
    """Refuse a name before it is looked up. To look up a number or this machine is not a call yet."""
    name = host.decode() if isinstance(host, bytes) else str(host or "")
    if name in ("", "localhost", socket.gethostname(), _database.get("host")) or _is_number(name):
        return
    _refuse_unless_allowed(name, int(port) if str(port).isdigit() else None)


def _is_number(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _check_process(program: Any) -> None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not intrusions.is_user_code(frame):
        if frame.f_globals.get("__name__") in _OF_PYTHON:
            return
        frame = frame.f_back
    _refuse(f"{program!r:.80}", sys._getframe(2), is_process=True)


def _refuse_unless_allowed(host: str, port: int | None) -> None:
    frame = sys._getframe(3)
    ports = {each for name, each in _allowed if name == host}
    if _is_allowed(host, port) or (port is None and ports) or _may_read(frame):
        return
    target = f"[{host}]" if ":" in host else host
    _refuse(target if port is None else f"{target}:{port}", frame)


def _refuse(target: str, frame: FrameType | None, *, is_process: bool = False) -> None:
    """Raise instead of the call, and record it unless a log line, an import or a thread of a library makes it."""
    while frame is not None and not intrusions.is_user_code(frame):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in NOT_THE_TASKS_DOING:
            raise BlockedCallError(str(BlockedCall(None, target, "", is_process)))
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    call = BlockedCall(_effect.get() or (_latest if where else None), target, where, is_process)
    if (call.where or call.effect) and call not in seen:
        seen.append(call)
    raise BlockedCallError(str(call))


def _guard_psycopg(database: URL) -> None:
    """It connects in C, which raises no audit event."""
    global _database, _guarded
    if "psycopg" not in sys.modules:
        return
    import psycopg

    if database.get_backend_name() == "postgresql":
        dialect = database.get_dialect()()
        _database = _server(**dialect.create_connect_args(database)[1])
    if _guarded:
        return
    _guarded = True
    for kind in (psycopg.Connection, psycopg.AsyncConnection):
        connect: Any = kind.connect
        kind.connect = classmethod(_guard(connect.__func__))  # type: ignore[assignment]
    psycopg.connect = psycopg.Connection.connect


def _guard(connect: Any) -> Any:
    def check_and_connect(cls: Any, conninfo: str = "", **more: Any) -> Any:
        if not _lifted and _effect.get() is not None:  # elsewhere, `intrusions` notes what it does there
            _check_server(_server(conninfo, **more), sys._getframe(1))
        return connect(cls, conninfo, **more)

    return check_and_connect


def _check_server(server: dict[str, str], frame: FrameType) -> None:
    if server == _database:
        return
    host, port = server["host"] or server["hostaddr"] or "localhost", server["port"] or "5432"
    if not (_is_allowed(host, int(port) if port.isdigit() else None) or _may_read(frame)):
        _refuse(f"{host}:{port}", frame)


def _server(conninfo: str = "", **more: Any) -> dict[str, str]:
    from psycopg.conninfo import conninfo_to_dict

    keys = ("host", "hostaddr", "port", "dbname")
    found = conninfo_to_dict(conninfo, **{key: value for key, value in more.items() if key in keys})
    return {key: str(found.get(key) or "") for key in keys}
