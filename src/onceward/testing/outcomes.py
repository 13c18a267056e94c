"""The check of a claim: a handler that `idempotent_outcome` declares leaves the same rows however often it is applied.

def test_set_level():
    check_idempotent_outcome(set_level, facts=[…], setup=create_tables)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import URL, Engine

from onceward.boundary.model import StoredFact
from onceward.boundary.strategies import CLAIM
from onceward.db import DbSession
from onceward.errors import ConfigurationError
from onceward.inbox import Inbox
from onceward.verify import tables
from onceward.verify.databases import Databases, async_engine_at, databases_of, engine_at


def check_idempotent_outcome(
    handler: Callable[[StoredFact, Any], Any],
    facts: Sequence[StoredFact],
    *,
    setup: Callable[[Engine], None],
    database: str | Engine | None = None,
    exclude: Sequence[str] | None = None,
) -> None:
    """Raises AssertionError with the rows that differ, if it makes a difference that facts come again.

    The facts are applied once each; and, in another database, each twice and then all again, as after a crash before
    the confirm. `setup(engine)` makes the tables. `database` is where databases of the check's own are made, SQLite
    files by default. `exclude` are columns that do not count, by default those that the database generates. For an
    asynchronous handler it runs an event loop, so call it outside of one.
    """
    claim = getattr(handler, CLAIM, None)
    if claim is None:
        raise ConfigurationError(
            f"{handler!r} makes no claim to check; declare it with @idempotent_outcome('why it may be applied again')"
        )
    if not facts:
        raise ConfigurationError("a claim is checked with sample facts; none were given")
    ordered = sorted(facts, key=lambda fact: fact.offset)
    twice = [fact for fact in ordered for _ in range(2)]
    databases = databases_of(database)
    try:
        found = databases.prepare(lambda engine: _set_up(engine, setup))
        databases.know(found)
        expected = _outcome(databases, found, exclude, handler, ordered)
        again = _outcome(databases, found, exclude, handler, [*twice, *ordered])
    finally:
        databases.close()
    differences = tables.differences(expected, again, found, exclude)
    if differences:
        name = getattr(handler, "__qualname__", repr(handler))
        raise AssertionError(
            "\n".join(
                [
                    f"{name} claims: {claim!r}. But facts that came again made a difference:",
                    *(f"    {line}" for line in differences),
                ]
            )
        )


def _set_up(engine: Engine, setup: Callable[[Engine], None]) -> None:
    Inbox(engine).migrate()  # the kit empties and compares its tables, too
    setup(engine)


def _outcome(
    databases: Databases,
    found: list[tables.Table],
    exclude: Sequence[str] | None,
    handler: Callable[[StoredFact, Any], Any],
    facts: list[StoredFact],
) -> tables.Rows:
    place = databases.place()
    databases.renew(place)
    if inspect.iscoroutinefunction(handler):
        asyncio.run(_apply_async(place, handler, facts))
    else:
        _apply(place, handler, facts)
    engine = engine_at(place)
    try:
        with engine.connect() as connection:
            return tables.read(connection, found, exclude)
    finally:
        engine.dispose()


def _apply(place: URL, handler: Callable[[StoredFact, Any], Any], facts: list[StoredFact]) -> None:
    engine = engine_at(place)
    try:
        for fact in facts:
            with DbSession(engine) as session:
                handler(fact, session)
    finally:
        engine.dispose()


async def _apply_async(
    place: URL, handler: Callable[[StoredFact, Any], Any], facts: list[StoredFact]
) -> None:
    from onceward.db import AsyncDbSession

    engine = async_engine_at(place)
    try:
        for fact in facts:
            async with AsyncDbSession(engine) as session:
                await handler(fact, session)
    finally:
        await engine.dispose()
