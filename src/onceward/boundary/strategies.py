"""Three ways to apply a fact that may come again. Each wraps a handler, for `BoundaryConsumer` and for asyncio alike.

    once = OncePerId("plant-a-receiver")                     1. a table of the ids that were processed

    @once
    def book(fact, session): …

    latest = LatestPerKey("plant-a-receiver", key=lambda fact: fact.fact.object["tank"])        2. a natural key

    @latest
    def set_level(fact, session): …

    @idempotent_outcome("sets the level of a tank to what the fact says")                       3. the outcome itself
    def set_level(fact, session): …

The first two keep a small table, made by `create_table(session)`, and write to it in the transaction of the outcome:
either both are there or none. It is not the table of `onceward.inbox`, which needs a registered consumer and a contract
and knows leases, order and effects outside the database. All that a boundary's consumer asks is whether it has
seen this fact.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from onceward._sync import run_blocking
from onceward.boundary.model import StoredFact, message_id_for
from onceward.db import DbSession
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from onceward.db import AsyncDbSession

DAY = 86400.0
FACT_DAYS = 7.0
"""How long a boundary keeps facts, unless it is told otherwise."""
CLAIM = "onceward_idempotent_outcome"
"""The attribute of a handler that says why it may be applied again."""

H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")


class _Guard:
    """Lets a fact through to the handler, or not. Written once: a session blocks or is awaited."""

    _create: tuple[str, ...] = ()

    def __init__(self, consumer_name: str) -> None:
        if not consumer_name:
            raise ConfigurationError("the rows belong to a consumer: give its name")
        self.consumer_name = consumer_name

    async def _is_let_through(self, fact: StoredFact, session: Any) -> bool:
        raise NotImplementedError

    def __call__(self, handler: H) -> H:
        @functools.wraps(handler)
        def guarded(fact: StoredFact, session: Any) -> Any:
            if not isinstance(session, DbSession):
                return guarded_async(fact, session)
            if run_blocking(self._is_let_through(fact, session)):
                return handler(fact, session)
            return None

        async def guarded_async(fact: StoredFact, session: Any) -> Any:
            if await self._is_let_through(fact, session):
                return await handler(fact, session)
            return None

        return cast(H, guarded)

    @overload
    def create_table(self, session: DbSession) -> None: ...
    @overload
    def create_table(self, session: AsyncDbSession) -> Awaitable[None]: ...
    def create_table(self, session: Any) -> Any:
        """Make the table unless it is there."""
        return _in(session, self._create_table(session))

    async def _create_table(self, session: Any) -> None:
        # PostgreSQL fails where two make the same table at the same time.
        await _ended(session.advisory_lock("onceward boundary strategies"))
        for statement in self._create:
            await _ended(session.execute(statement))


class OncePerId(_Guard):
    """Strategy 1: a table of the message ids that were processed. Fits every handler.

    The id is written in the transaction of the outcome, so a crash leaves both or none. Rows are kept for `keep_days`
    at least, which must be no less than the boundary keeps facts: a fact that can still come must still be known.
    `purge` removes older ones, and never happens by itself. `clock` tells seconds since 1970.
    """

    _create = (
        """
        CREATE TABLE IF NOT EXISTS onceward_processed_facts (
            consumer_name VARCHAR(400) NOT NULL,
            message_id VARCHAR(400) NOT NULL,
            seen_at DOUBLE PRECISION NOT NULL,
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
                f"keep_days must be as many as the boundary keeps facts, {FACT_DAYS:g} by default, not {keep_days}"
            )
        self._keep = keep_days * DAY
        self._clock = clock

    async def _is_let_through(self, fact: StoredFact, session: Any) -> bool:
        # Never older than the fact itself, even if this machine's clock is behind the boundary's.
        seen_at = max(self._clock(), fact.appended_at_unix_ms / 1000)
        row = {"consumer_name": self.consumer_name, "message_id": fact.message_id, "seen_at": seen_at}
        key = ("consumer_name", "message_id")
        return bool(await _ended(session.insert_idempotent("onceward_processed_facts", row, key=key)))

    @overload
    def purge(self, session: DbSession) -> int: ...
    @overload
    def purge(self, session: AsyncDbSession) -> Awaitable[int]: ...
    def purge(self, session: Any) -> Any:
        """Remove this consumer's rows that are older than `keep_days`. Returns how many."""
        return _in(session, self._purge(session))

    async def _purge(self, session: Any) -> int:
        oldest = self._clock() - self._keep
        return int(await _ended(session.execute(PURGE, {"name": self.consumer_name, "oldest": oldest})))


PURGE = "DELETE FROM onceward_processed_facts WHERE consumer_name = :name AND seen_at < :oldest"


class LatestPerKey(_Guard):
    """Strategy 2: a natural key, whose state is set by its newest fact. Fits an upsert.

    The key is the fact's subject and predicate, and `key(fact)`, the business key out of its object. (The guide joins
    them with underscores. Here it is a hash, since otherwise `x_a` and `b` would be the same as `x` and `a_b`.) The
    handler is called for facts that are newer than the last one applied to their key. Others are passed over.

    *Newer* is a higher offset in the one log that this consumer reads, whatever time an envelope tells. Offsets of two
    boundaries cannot be compared: each needs a consumer name of its own, and so does a log that was begun anew. As
    facts may be passed over, the handler must set a state, not add to one. One row for each key stays for good.
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

    async def _is_let_through(self, fact: StoredFact, session: Any) -> bool:
        key = self._key(fact)
        if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
            raise TypeError(
                f"the business key of fact {fact.message_id} must be a text or a whole number, not {key!r:.80}"
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
        return bool(await _ended(session.execute(ADVANCE, row)) == 1)


ADVANCE = """
    INSERT INTO onceward_latest_facts
        (consumer_name, natural_key, subject, predicate, business_key, applied_offset)
    VALUES (:consumer_name, :natural_key, :subject, :predicate, :business_key, :applied_offset)
    ON CONFLICT (consumer_name, natural_key) DO UPDATE
    SET applied_offset = excluded.applied_offset
    WHERE excluded.applied_offset > onceward_latest_facts.applied_offset
"""


def idempotent_outcome(claim: str) -> Callable[[H], H]:
    """Strategy 3: declares that a handler may be applied again, because its outcome is the same by nature.

    `claim` says why, in a sentence. Nothing is kept and nothing is skipped, so the claim has to be true:
    `onceward.testing.outcomes.check_idempotent_outcome` applies sample facts again and compares the rows. Only the end
    counts. While a batch comes again, its older facts may show for a moment; `LatestPerKey` never goes back.
    """
    if not isinstance(claim, str) or not claim.strip():
        raise ConfigurationError(
            "say in a sentence why this handler may be applied again: @idempotent_outcome('sets … to …')"
        )

    def declare(handler: H) -> H:
        setattr(handler, CLAIM, claim)
        return handler

    return declare


def _in(session: Any, work: Coroutine[Any, Any, T]) -> T | Coroutine[Any, Any, T]:
    return run_blocking(work) if isinstance(session, DbSession) else work


async def _ended(result: Any) -> Any:
    """What a session's method returns, or what it gives when it is awaited."""
    return await result if isinstance(result, Awaitable) else result
