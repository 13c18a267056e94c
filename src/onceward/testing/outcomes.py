"""Checks the claim of `@idempotent_outcome`: the handler leaves the same rows however often it is applied.

def test_set_level():
    check_idempotent_outcome(set_level, facts=[…], setup=create_tables)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import URL, Engine

from onceward._functions import awaiting, check_result, is_async
from onceward.boundary.model import StoredFact
from onceward.boundary.strategies import CLAIM
from onceward.db import DbSession
from onceward.errors import ConfigurationError
from onceward.inbox import Inbox
from onceward.verify.databases import Databases, async_engine_at, databases_of, engine_at
from onceward.verify.rows import schema, tables


def check_idempotent_outcome(
    handler: Callable[[StoredFact, Any], Any],
    facts: Sequence[StoredFact],
    *,
    setup: Callable[[Engine], None],
    database: str | Engine | None = None,
    exclude: Sequence[str] | None = None,
) -> None:
    """Raise AssertionError, with the rows that differ, if applying facts again changes the outcome.

    Applies each fact once; and, in another database, each twice and then all again, as after a crash before the
    confirm. `setup(engine)` creates the tables. The check creates its own databases on the server of `database`; SQLite
    files by default. `exclude` names columns that are not compared; by default those that the database generates. For
    an async handler it runs an event loop, so call it outside of one.
    """
    claim = getattr(handler, CLAIM, None)
    if claim is None:
        raise ConfigurationError(
            f"{handler!r} makes no claim to check; declare it with @idempotent_outcome('why it may be applied again')"
        )
    if not facts:
        raise ConfigurationError("no sample facts to check the claim with; pass facts=[…]")
    ordered = sorted(facts, key=lambda fact: fact.offset)
    twice = [fact for fact in ordered for _ in range(2)]
    databases = databases_of(database)
    try:
        found = databases.prepare(lambda engine: _set_up(engine, setup))
        databases.learn(found)
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
                    f"{name} claims: {claim!r}. But applying facts again changed the outcome:",
                    *(f"    {line}" for line in differences),
                ]
            )
        )


def _set_up(engine: Engine, setup: Callable[[Engine], None]) -> None:
    Inbox(engine).migrate()  # `Databases` empties the inbox tables, and `tables` reads them
    setup(engine)


def _outcome(
    databases: Databases,
    found: list[schema.Table],
    exclude: Sequence[str] | None,
    handler: Callable[[StoredFact, Any], Any],
    facts: list[StoredFact],
) -> tables.Rows:
    url = databases.next_url()
    databases.renew(url)
    if is_async(handler):
        asyncio.run(_apply_async(url, handler, facts))
    else:
        _apply(url, handler, facts)
    engine = engine_at(url)
    try:
        with engine.connect() as connection:
            return tables.read(connection, found, exclude)
    finally:
        engine.dispose()


def _apply(url: URL, handler: Callable[[StoredFact, Any], Any], facts: list[StoredFact]) -> None:
    engine = engine_at(url)
    try:
        for fact in facts:
            with DbSession(engine) as session:
                check_result(handler(fact, session), handler)
    finally:
        engine.dispose()


async def _apply_async(url: URL, handler: Callable[[StoredFact, Any], Any], facts: list[StoredFact]) -> None:
    from onceward.db import AsyncDbSession

    engine = async_engine_at(url)
    try:
        for fact in facts:
            async with AsyncDbSession(engine) as session:
                await awaiting(handler)(fact, session)
    finally:
        await engine.dispose()
