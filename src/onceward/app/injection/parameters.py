"""What a parameter gets of the message at hand: the transaction, the inbox's session, or a guest of its transaction."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from onceward.errors import ConfigurationError
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.db.guests import Kind

    Taken = Literal["transaction", "session"] | Kind


def taken_by_hint(name: str, hint: Any) -> Taken | None:
    """What the parameter gets of the message; None if it gets something else."""
    hint = plain(hint)
    hint = plain(getattr(hint, "__supertype__", hint))  # of a NewType
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
    """The type of `Annotated[type, …]`, `type | None` and a `type` statement. What else `Annotated` has is for other
    frameworks, such as `Depends`."""
    while True:
        of = None
        if type(hint).__name__ == "TypeAliasType":  # of typing or typing_extensions
            of = hint.__value__
        elif get_origin(hint) is Annotated:
            of = get_args(hint)[0]
        elif get_origin(hint) in (Union, UnionType):
            others = [each for each in get_args(hint) if each is not NoneType]
            of = others[0] if len(others) == 1 else None
        if of is None:
            return hint
        hint = of


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
        if kind.family == "orm":
            _check_making(name, parameter, kind)


def _check_making(name: str, parameter: str, kind: Kind) -> None:
    """Refuse a class of sessions that cannot be made as SQLAlchemy's own."""
    for cls in (kind.cls, getattr(kind.cls, "sync_session_class", kind.cls)):
        try:
            inspect.signature(cls).bind(join_transaction_mode="create_savepoint", info={})
        except TypeError as error:
            raise ConfigurationError(
                f"{name} takes {parameter}: {kind.name}, but the inbox cannot make it: {error}. It makes "
                f"{cls.__qualname__}(join_transaction_mode=…, info=…), as sqlalchemy.orm.Session; let __init__ of "
                "the class take **kwargs and pass them on"
            ) from None


OTHERS = {
    ("orm", True): "sqlalchemy.ext.asyncio.AsyncSession",
    ("orm", False): "sqlalchemy.orm.Session",
    ("psycopg", True): "psycopg.AsyncConnection",
    ("psycopg", False): "psycopg.Connection",
    ("sqlite3", True): "sqlalchemy.ext.asyncio.AsyncSession",
}
"""What a consumer in asyncio (True) or in threads annotates."""
