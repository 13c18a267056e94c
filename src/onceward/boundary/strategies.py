"""Three ways to apply a fact that may arrive twice. Each wraps a handler, for `BoundaryConsumer` and for asyncio alike.

    once = OncePerId("plant-a-receiver")                     1. a table of processed ids

    @once
    def book(fact, session): …

    latest = LatestPerKey("plant-a-receiver", key=lambda fact: fact.fact.object["tank"])        2. a natural key

    @latest
    def set_level(fact, session): …

    @idempotent_outcome("sets the level of a tank to that of the fact")                         3. the outcome itself
    def set_level(fact, session): …

The first two keep a small table, created by `create_table(session)`, and write to it in the transaction of the outcome:
both are committed, or neither is. It is not the table of `onceward.inbox`, which needs a registered consumer and a
contract, and handles leases, order and effects outside the database. A boundary's consumer only needs to know whether
it has seen this fact.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from sqlalchemy import inspect, text

from onceward._functions import awaiting, check_function, name_of
from onceward._sync import run_blocking
from onceward.boundary.model import StoredFact, message_id_for
from onceward.db import DbSession
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.db import AsyncDbSession

DAY = 86400.0
FACT_DAYS = 7.0
"""How long a boundary keeps facts by default."""
CLAIM = "onceward_idempotent_outcome"
"""The attribute of a handler that says why it may be applied again."""

PURGE = """
    DELETE FROM onceward_processed_facts WHERE consumer_name = :name AND seen_at < :oldest AND fact_offset < (
        SELECT log_begins_at FROM onceward_processed_facts WHERE consumer_name = :name ORDER BY seen_at DESC LIMIT 1
    )
"""
REFRESH = """
    INSERT INTO onceward_processed_facts (consumer_name, message_id, seen_at, fact_offset, log_begins_at)
    VALUES (:consumer_name, :message_id, :seen_at, :fact_offset, :log_begins_at)
    ON CONFLICT (consumer_name, message_id) DO UPDATE
    SET seen_at = excluded.seen_at, fact_offset = excluded.fact_offset, log_begins_at = excluded.log_begins_at
    WHERE excluded.fact_offset > onceward_processed_facts.fact_offset
"""
"""Run for a copy of a known fact: the boundary appends the fact again if its producer repeats it after the boundary has
forgotten the id. Inserts the row if a purge has just removed it."""
ADVANCE = """
    INSERT INTO onceward_latest_facts
        (consumer_name, natural_key, subject, predicate, business_key, applied_offset)
    VALUES (:consumer_name, :natural_key, :subject, :predicate, :business_key, :applied_offset)
    ON CONFLICT (consumer_name, natural_key) DO UPDATE
    SET applied_offset = excluded.applied_offset
    WHERE excluded.applied_offset > onceward_latest_facts.applied_offset
"""

H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")


class _Guard:
    """Passes a fact to the handler, or not. The same code serves blocking and asyncio sessions."""

    _create: tuple[str, ...] = ()

    def __init__(self, consumer_name: str) -> None:
        if not consumer_name:
            raise ConfigurationError(
                "consumer_name is empty; pass the name of the consumer that owns the rows"
            )
        self.consumer_name = consumer_name

    async def _admits(self, fact: StoredFact, session: Any) -> bool:
        raise NotImplementedError

    def __call__(self, handler: H) -> H:
        check_function(handler, f"the handler {name_of(handler)}", asynchronous=True)

        @functools.wraps(handler)
        def guarded(fact: StoredFact, session: Any) -> Any:
            if not isinstance(session, DbSession):
                return guarded_async(fact, session)
            if run_blocking(self._admits(fact, session)):
                return handler(fact, session)
            return None

        async def guarded_async(fact: StoredFact, session: Any) -> Any:
            if await self._admits(fact, session):
                return await awaiting(handler)(fact, session)
            return None

        return cast(H, guarded)

    @overload
    def create_table(self, session: DbSession) -> None: ...
    @overload
    def create_table(self, session: AsyncDbSession) -> Awaitable[None]: ...
    def create_table(self, session: Any) -> Any:
        """Create the table unless it exists."""
        return _run(session, self._create_table(session))

    async def _create_table(self, session: Any) -> None:
        # PostgreSQL fails if two sessions create the same table at the same time.
        await _result(session.advisory_lock("onceward boundary strategies"))
        for statement in self._create:
            await _result(session.execute(statement))


class OncePerId(_Guard):
    """Strategy 1: a table of processed message ids. Fits every handler.

    The id is written in the transaction of the outcome, so a crash leaves both or neither. Rows are kept for at least
    `keep_days` since the newest copy of the fact came, and as long as the boundary has that copy: one that can still
    arrive must be recognized. Set `keep_days`
    to no less than the boundary keeps facts. Call `purge` to remove older rows; it never runs on its own. Use one name
    per boundary: `purge` compares offsets. `clock` returns seconds since 1970.
    """

    _create = (
        """
        CREATE TABLE IF NOT EXISTS onceward_processed_facts (
            consumer_name VARCHAR(400) NOT NULL,
            message_id VARCHAR(400) NOT NULL,
            seen_at DOUBLE PRECISION NOT NULL,
            fact_offset BIGINT,
            log_begins_at BIGINT,
            PRIMARY KEY (consumer_name, message_id)
        )
        """,
        """
        CREATE INDEX IF NOT EXISTS onceward_processed_facts_by_age
        ON onceward_processed_facts (consumer_name, seen_at)
        """,
    )

    def __init__(
        self, consumer_name: str, *, keep_days: float = FACT_DAYS, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(consumer_name)
        if not keep_days > 0:
            raise ConfigurationError(
                f"keep_days must be at least as many as the boundary keeps facts, {FACT_DAYS:g} by default, not "
                f"{keep_days}"
            )
        self._keep = keep_days * DAY
        self._clock = clock

    async def _create_table(self, session: Any) -> None:
        await super()._create_table(session)
        await _result(session.apply(_add_columns))

    async def _admits(self, fact: StoredFact, session: Any) -> bool:
        # Never older than the fact itself, even if this machine's clock is behind that of the boundary.
        seen_at = max(self._clock(), fact.appended_at_unix_ms / 1000)
        row = {
            "consumer_name": self.consumer_name,
            "message_id": fact.message_id,
            "seen_at": seen_at,
            "fact_offset": fact.offset,
            "log_begins_at": fact.log_begins_at,
        }
        key = ("consumer_name", "message_id")
        if await _result(session.insert_idempotent("onceward_processed_facts", row, key=key)):
            return True
        await _result(session.execute(REFRESH, row))
        return False

    @overload
    def purge(self, session: DbSession) -> int: ...
    @overload
    def purge(self, session: AsyncDbSession) -> Awaitable[int]: ...
    def purge(self, session: Any) -> Any:
        """Remove this consumer's rows older than `keep_days` whose facts the boundary no longer has. Return how many.

        What the boundary has is known from the fact that was applied last. Rows of facts that came without that, from a
        boundary of an earlier version, stay.
        """
        return _run(session, self._purge(session))

    async def _purge(self, session: Any) -> int:
        oldest = self._clock() - self._keep
        return int(await _result(session.execute(PURGE, {"name": self.consumer_name, "oldest": oldest})))


class LatestPerKey(_Guard):
    """Strategy 2: a natural key, whose state is set by its newest fact. Fits an upsert.

    The key is the fact's subject, its predicate and `key(fact)`, the business key in its object. (The guide joins them
    with underscores. This is a hash, since otherwise `x_a` and `b` would be the same as `x` and `a_b`.) The handler is
    called for facts that are newer than the last one applied to their key. Others are skipped.

    *Newer* means a higher offset in the one log that this consumer reads, whatever the time in the envelope. Offsets of
    two boundaries cannot be compared: each needs its own consumer name, and so does a log that was started over. As
    facts may be skipped, the handler must set a state, not add to one. One row per key is kept permanently.
    """

    _create = (
        """
        CREATE TABLE IF NOT EXISTS onceward_latest_facts (
            consumer_name VARCHAR(400) NOT NULL,
            natural_key CHAR(64) NOT NULL,
            subject TEXT NOT NULL,
            predicate TEXT NOT NULL,
            business_key TEXT NOT NULL,
            applied_offset BIGINT NOT NULL,
            PRIMARY KEY (consumer_name, natural_key)
        )
        """,
    )

    def __init__(self, consumer_name: str, *, key: Callable[[StoredFact], str | int]) -> None:
        super().__init__(consumer_name)
        self._key = key

    async def _admits(self, fact: StoredFact, session: Any) -> bool:
        key = self._key(fact)
        if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
            raise TypeError(
                f"the business key of fact {fact.message_id} must be a nonempty string or an integer, not {key!r:.80}"
            )
        subject, predicate = fact.fact.subject, fact.fact.predicate
        row = {
            "consumer_name": self.consumer_name,
            "natural_key": message_id_for(subject, predicate, key),
            "subject": subject,
            "predicate": predicate,
            "business_key": str(key),
            "applied_offset": fact.offset,
        }
        return bool(await _result(session.execute(ADVANCE, row)) == 1)


def _add_columns(transaction: Any) -> None:
    """Earlier versions created the table without them."""
    known = {each["name"] for each in inspect(transaction.connection).get_columns("onceward_processed_facts")}
    for name in ("fact_offset", "log_begins_at"):
        if name not in known:
            transaction.connection.execute(
                text(f"ALTER TABLE onceward_processed_facts ADD COLUMN {name} BIGINT")
            )


def idempotent_outcome(claim: str) -> Callable[[H], H]:
    """Strategy 3: declare that a handler may be applied again, because its outcome is the same by nature.

    `claim` says why, in a sentence. Nothing is stored or skipped, so the claim must be true:
    `onceward.testing.outcomes.check_idempotent_outcome` applies sample facts again and compares the rows. Only the end
    result counts: while a batch is redelivered, its older facts may show for a moment. `LatestPerKey` never goes back.
    """
    if not isinstance(claim, str) or not claim.strip():
        raise ConfigurationError(
            "say in a sentence why this handler may be applied again: @idempotent_outcome('sets … to …')"
        )

    def declare(handler: H) -> H:
        check_function(handler, f"the handler {name_of(handler)}", asynchronous=True)
        setattr(handler, CLAIM, claim)
        return handler

    return declare


def _run(session: Any, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
    return run_blocking(work) if isinstance(session, DbSession) else work


async def _result(result: Any) -> Any:
    """Return the result of a session's method, awaited if it has to be."""
    return await result if isinstance(result, Awaitable) else result
