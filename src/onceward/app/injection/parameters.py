"""What a parameter gets of the message at hand: the transaction, the inbox's session, or a guest of its transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from onceward.errors import ConfigurationError
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.db.guests import Kind

    Taken = Literal["transaction", "session"] | Kind


def taken_by_hint(name: str, hint: Any) -> Taken | None:
    """What the parameter gets of the message; None if it gets something else."""
    hint = plain(hint)
    if hint is Transaction:
        return "transaction"
    if (kind := guest_kind(hint)) is not None:
        return kind
    return "session" if is_inbox_session(hint) or name == "session" else None


def shared_kinds(taker: str, kinds: Iterable[Kind]) -> dict[str, Kind]:
    """One guest of each family for all that take one: a handler and its services. The most special class serves all."""
    found: dict[str, Kind] = {}
    for kind in kinds:
        known = found.setdefault(kind.family, kind)
        if issubclass(kind.cls, known.cls):
            found[kind.family] = kind
        elif not issubclass(known.cls, kind.cls):
            raise ConfigurationError(
                f"{taker} and its services take {known.name} and {kind.name}, but a message has one session; annotate "
                "one class, or a base of both"
            )
    return found


def plain(hint: Any) -> Any:
    """The type of `Annotated[type, …]`: what is behind it is for other frameworks, such as `Depends`."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def guest_kind(hint: Any) -> Kind | None:
    """Whose session or connection an annotation asks for. Imports SQLAlchemy only if it may be one."""
    hint = get_origin(hint) or hint  # psycopg's connections are generic in their rows
    bases = {each.__module__.partition(".")[0] for each in hint.__mro__} if isinstance(hint, type) else ()
    if not {"sqlalchemy", "sqlite3", "psycopg"}.intersection(bases):
        return None
    from onceward.db.guests import kind_of

    return kind_of(hint)


def is_inbox_session(hint: Any) -> bool:
    """Asked by name, so an app without a database does not import SQLAlchemy."""
    names = ("InboxSession", "AsyncInboxSession", "EffectfulSession", "AsyncEffectfulSession")
    return getattr(hint, "__module__", "").startswith("onceward.inbox.") and hint.__name__ in names


def check_guests(name: str, guests: Mapping[str, Kind], *, contract: bool, asynchronous: bool) -> None:
    """Refuse sessions and connections that this consumer cannot get."""
    seen: dict[str, str] = {}
    for parameter, kind in guests.items():
        if not contract:
            raise ConfigurationError(
                f"{name} takes {parameter}: {kind.name}, but has no contract, so nothing would commit it; pass "
                "contract=Contract(…), and give the app a database"
            )
        if kind.asynchronous != asynchronous:
            mode, other = (
                ("asyncio", OTHERS[kind.family, True])
                if asynchronous
                else ("threads", OTHERS[kind.family, False])
            )
            raise ConfigurationError(
                f"{name} takes {parameter}: {kind.name}, but it runs in {mode}; annotate {other}, or make the consumer "
                f"{'a plain `def`' if asynchronous else '`async def`'}"
            )
        if kind.family in seen:
            raise ConfigurationError(
                f"{name} takes {seen[kind.family]} and {parameter}, which would both be {kind.name} on one "
                "transaction; keep one of them"
            )
        seen[kind.family] = parameter


OTHERS = {
    ("orm", True): "sqlalchemy.ext.asyncio.AsyncSession",
    ("orm", False): "sqlalchemy.orm.Session",
    ("psycopg", True): "psycopg.AsyncConnection",
    ("psycopg", False): "psycopg.Connection",
    ("sqlite3", True): "sqlalchemy.ext.asyncio.AsyncSession",
}
"""What a consumer in asyncio (True) or in threads annotates."""
