"""The store on PostgreSQL, for several servers on one database.

Concurrent appends share one transaction. It locks the one row that holds the last offset until the commit is done. So
offsets have no gaps and become visible in order, whichever server assigns them (D-18). A sequence would do neither: it
does not roll back with a transaction, and of two transactions the one with the later offset may commit first.

An append is as durable as a commit of PostgreSQL. To survive the loss of its machine, it needs a standby in
`synchronous_standby_names`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from onceward._time import Moment
from onceward.boundary.errors import Backpressure, BoundaryError, ConflictingDuplicate, Unavailable
from onceward.boundary.holes import Hole
from onceward.boundary.model import PAGE_BYTES, Appended, Gap
from onceward.boundary.store import (
    Bounds,
    Cursor,
    NewFact,
    Outcome,
    StoreDurability,
    full,
    too_many_names,
)
from onceward.boundary.stores.group_commit import Grouped
from onceward.boundary.stores.postgresql.connections import PostgreSqlConnections, one_line
from onceward.boundary.stores.postgresql.objects import PostgreSqlObjects
from onceward.boundary.stores.postgresql.schema import LOCK_KEY, ROW_BYTES, answer_of, prepare
from onceward.boundary.wire import AROUND_RECORD, Record
from onceward.errors import ConfigurationError

CONNECTIONS = 8
"""For everything except the two writers, which have their own."""
MOST_REMOVED = 2000
"""Facts in one step of expiry: appends must not wait for all of it."""

APPEND = """
    SELECT message_id, "offset", digest FROM onceward_boundary_append(%(ids)b::text[], %(digests)b::bytea[],
        %(records)b::bytea[], %(streams)b::text[], %(times)b::bigint[], %(limits)b::bigint[])
"""
READ = f"""
    SELECT "offset", record, appended_at FROM (
        SELECT "offset", record, appended_at, row_number() OVER in_order AS place,
            sum(octet_length(record) + {AROUND_RECORD}) OVER in_order AS bytes_so_far
        FROM (
            SELECT "offset", record, appended_at FROM onceward_boundary_facts
            WHERE "offset" > %s ORDER BY "offset" LIMIT %s
        ) AS page
        WINDOW in_order AS (ORDER BY "offset" ROWS UNBOUNDED PRECEDING)
    ) AS counted WHERE bytes_so_far <= %s OR place = 1
"""
TIMES_AFTER = """
    SELECT (SELECT appended_at FROM onceward_boundary_facts WHERE "offset" > at ORDER BY "offset" LIMIT 1)
    FROM unnest(%s::bigint[]) WITH ORDINALITY AS given (at, place) ORDER BY place
"""
BOUNDS = 'SELECT (SELECT min("offset") FROM onceward_boundary_facts), last FROM onceward_boundary_log'
SIZE = "SELECT bytes FROM onceward_boundary_log"
REMOVE = f"""
    WITH removed AS (
        DELETE FROM onceward_boundary_facts WHERE "offset" = ANY(ARRAY({{which}} FOR UPDATE SKIP LOCKED))
        RETURNING "offset", octet_length(record) + {ROW_BYTES} AS bytes
    ), counted AS (
        UPDATE onceward_boundary_log SET bytes = bytes - (SELECT coalesce(sum(bytes), 0) FROM removed),
            removals = removals + 1
        RETURNING removals
    ), noted AS (
        INSERT INTO onceward_boundary_holes (first, last, removal)
        SELECT min("offset"), max("offset"), (SELECT removals FROM counted)
        FROM (SELECT "offset", "offset" - row_number() OVER (ORDER BY "offset") AS run FROM removed) AS in_runs
        GROUP BY run
        ON CONFLICT (last) DO UPDATE SET first = excluded.first, removal = excluded.removal
    )
    SELECT count(*) FROM removed
"""  # skips what another server is removing, so the two do not wait for each other
EXPIRED = """
    SELECT "offset" FROM onceward_boundary_facts WHERE stream = %s AND appended_at < %s ORDER BY appended_at LIMIT %s
"""
UP_TO = 'SELECT "offset" FROM onceward_boundary_facts WHERE "offset" <= %s ORDER BY "offset" LIMIT %s'
HOLES = """
    SELECT first, last FROM onceward_boundary_holes WHERE last BETWEEN %s AND %s
        AND removal <= (SELECT after_removal FROM onceward_boundary_cursors WHERE name = %s)
"""  # none reaches beyond the fact that ends a gap
FORGET_HOLES = """
    DELETE FROM onceward_boundary_holes WHERE last <= coalesce(
        least((SELECT min("offset") FROM onceward_boundary_facts),
            (SELECT min(position) FROM onceward_boundary_cursors)),
        (SELECT last FROM onceward_boundary_log))
"""  # those that every name has passed, and that no new one would meet
NAMES_LOCK = LOCK_KEY + 1
"""Advisory lock for registering a name: the count holds until it is committed."""
COUNT = "SELECT count(*) FROM onceward_boundary_cursors"
REMOVE_CURSOR = "DELETE FROM onceward_boundary_cursors WHERE name = %s RETURNING position"
POSITION = "SELECT position FROM onceward_boundary_cursors WHERE name = %s"
CREATE_CURSOR = """
    INSERT INTO onceward_boundary_cursors (name, position, after_removal)
    SELECT %s, %s, removals FROM onceward_boundary_log ON CONFLICT DO NOTHING
"""
ADVANCE = """
    INSERT INTO onceward_boundary_cursors AS known (name, position, confirmed_at)
    SELECT name, position, at FROM unnest(%s::text[], %s::bigint[], %s::bigint[]) AS given (name, position, at)
    ORDER BY name
    ON CONFLICT (name) DO UPDATE SET
        position = greatest(known.position, excluded.position),
        confirmed_at = CASE WHEN excluded.position > known.position
            THEN excluded.confirmed_at ELSE known.confirmed_at END
    RETURNING name, position
"""  # in order of names, so two servers do not deadlock
CURSORS = "SELECT name, position, confirmed_at FROM onceward_boundary_cursors ORDER BY name"


class Confirm(NamedTuple):
    name: str
    offset: int
    at: int


class PostgreSqlBoundaryStore:
    """A `BoundaryStore` in one database, which any number of servers may open."""

    def __init__(self, url: str) -> None:
        """Use `open`."""
        self._writing = PostgreSqlConnections(url, 2)
        self._connections = PostgreSqlConnections(url, CONNECTIONS)
        self._appends = Grouped(self._append_all, bytes_of=lambda fact: len(fact.record))
        self._confirms = Grouped(self._advance_all)
        self.objects = PostgreSqlObjects(self._connections)

    @classmethod
    async def open(cls, url: str) -> PostgreSqlBoundaryStore:
        """Open `postgresql://user@host/database`. Create the tables unless they exist."""
        store = cls(url)
        try:
            async with store._writing.one() as connection:
                await prepare(connection)
            await store.objects.remove_interrupted()
        except Unavailable as error:
            await store.close()
            raise ConfigurationError(
                f"cannot open the boundary's database: {one_line(error.__cause__)}; check its URL, that it is "
                "running, and that its user may create tables"
            ) from error
        except BaseException:
            await store.close()
            raise
        return store

    # ── facts ───────────────────────────────────────────────────────────────────────────────────────────

    async def append(self, fact: NewFact) -> Appended:
        outcome = await self._appends.submit(fact)
        if isinstance(outcome, BoundaryError):
            raise outcome
        return outcome

    async def append_all(self, facts: Sequence[NewFact]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        refused: Backpressure | None = None
        for portion in self._appends.split(facts):
            if refused is None:
                outcomes += await self._appends.submit_all(portion)
                refused = next((each for each in outcomes if isinstance(each, Backpressure)), None)
                continue
            # No new one, though room may have been made since: of facts in order, the first ones are written.
            found = await self._appends.submit_all([structs.replace(fact, within=0) for fact in portion])
            outcomes += [refused if isinstance(each, Backpressure) else each for each in found]
        return outcomes

    async def read(self, after: int, limit: int, largest: int = PAGE_BYTES) -> list[Record]:
        return await self._query(READ, after, limit, largest)

    async def times_after(self, offsets: Sequence[int]) -> list[int | None]:
        return [time for (time,) in await self._query(TIMES_AFTER, list(offsets))]

    async def bounds(self) -> Bounds:
        [(first, last)] = await self._query(BOUNDS)
        return Bounds(last + 1 if first is None else first, last)

    async def size(self) -> int:
        [(size,)] = await self._query(SIZE)
        return int(size)

    async def expire(self, older_than: Mapping[str, int], at_most: int | None = None) -> int:
        total = 0
        for stream, before in older_than.items():
            left = None if at_most is None else at_most - total
            total += await self._remove(EXPIRED, stream, before, at_most=left)
        return total

    async def drop(self, through: int) -> int:
        return await self._remove(UP_TO, through)

    async def _remove(self, which: str, *values: str | int, at_most: int | None = None) -> int:
        """Remove in steps, between which appends get a turn."""
        total = 0
        while True:
            size = MOST_REMOVED if at_most is None else min(MOST_REMOVED, at_most - total)
            [(removed,)] = await self._query(REMOVE.format(which=which), *values, size)
            total += int(removed)
            if removed:
                await self._query(FORGET_HOLES)
            if removed < MOST_REMOVED:
                return total

    # ── cursors ─────────────────────────────────────────────────────────────────────────────────────────

    async def position(
        self, name: str, *, create: bool, start: int = 0, most: int | None = None
    ) -> int | None:
        rows = await self._query(POSITION, name)
        if not rows and create:
            await self._register(name, start, most)
            rows = await self._query(POSITION, name)  # another server may have created it, and advanced it
        return int(rows[0][0]) if rows else None

    async def _register(self, name: str, start: int, most: int | None) -> None:
        async with self._connections.one() as connection, connection.transaction():
            if most is not None:
                await connection.execute("SELECT pg_advisory_xact_lock(%s)", (NAMES_LOCK,))
                if (
                    await answer_of(connection, POSITION, name) is None
                    and await answer_of(connection, COUNT) >= most
                ):
                    raise too_many_names(name, most)
            await connection.execute(CREATE_CURSOR, (name, start))

    async def holes(self, name: str, gap: Gap) -> list[Hole]:
        return await self._query(HOLES, gap.first_missing, gap.last_missing, name)

    async def remove(self, name: str) -> int | None:
        rows = await self._query(REMOVE_CURSOR, name)
        return int(rows[0][0]) if rows else None

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        return await self._confirms.submit(Confirm(name, offset, at or _now()))

    async def cursors(self) -> list[Cursor]:
        return [Cursor(*row) for row in await self._query(CURSORS)]

    async def durability(self) -> StoreDurability:
        [(fsync,)] = await self._query("SHOW fsync")
        if fsync == "on":
            return StoreDurability("machine_crash", "the boundary's store is PostgreSQL, with fsync on")
        return StoreDurability(
            "process_crash",
            "the boundary's store is PostgreSQL with fsync=off: a power cut may lose facts, and break the database",
            "set fsync = on in postgresql.conf",
        )

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────

    async def trusted_time(self) -> Moment | None:
        [(moment,)] = await self._query("SELECT trusted_time FROM onceward_boundary_log")
        return None if moment is None else msgspec.json.decode(moment, type=Moment)

    async def trust_time(self, moment: Moment) -> None:
        text = msgspec.json.encode(moment).decode()
        await self._query("UPDATE onceward_boundary_log SET trusted_time = %s", text)

    async def close(self) -> None:
        await self._appends.close()
        await self._confirms.close()
        await self._writing.close()
        await self._connections.close()

    async def _query(self, query: str, *values: Any) -> list[Any]:
        async with self._connections.one() as connection:
            cursor = await connection.execute(query, values, binary=True)
            return await cursor.fetchall() if cursor.description else []

    # ── writing in groups ───────────────────────────────────────────────────────────────────────────────

    async def _append_all(self, facts: Sequence[NewFact]) -> list[Outcome]:
        first_of_each: dict[str, NewFact] = {}
        for fact in facts:
            first_of_each.setdefault(fact.message_id, fact)
        async with self._writing.one() as connection:
            appending = await connection.execute(APPEND, _columns(first_of_each.values()), binary=True)
            found = {
                message_id: (offset, digest) for message_id, offset, digest in await appending.fetchall()
            }
            size = 0
            if len(found) < len(first_of_each):
                [(size,)] = await (await connection.execute(SIZE)).fetchall()
        return [_outcome(fact, found, size) for fact in facts]

    async def _advance_all(self, confirms: Sequence[Confirm]) -> list[int]:
        highest: dict[str, Confirm] = {}
        for each in confirms:
            highest[each.name] = max(each, highest.get(each.name, each), key=lambda confirm: confirm.offset)
        columns = [list(column) for column in zip(*highest.values(), strict=True)]
        async with self._writing.one() as connection:
            advancing = await connection.execute(ADVANCE, columns)
            positions = dict(await advancing.fetchall())
        return [positions[confirm.name] for confirm in confirms]


def _columns(facts: Collection[NewFact]) -> dict[str, list[Any]]:
    now = _now()
    return {
        "ids": [fact.message_id for fact in facts],
        "digests": [fact.digest for fact in facts],
        "records": [fact.record for fact in facts],
        "streams": [fact.stream for fact in facts],
        "times": [fact.appended_at or now for fact in facts],
        "limits": [fact.within for fact in facts],
    }


def _outcome(fact: NewFact, found: dict[str, tuple[int, bytes | None]], size: int) -> Outcome:
    if fact.message_id not in found:
        return full(size, fact.within or 0)
    offset, digest = found[fact.message_id]
    if digest is None:
        found[fact.message_id] = offset, fact.digest  # the next with this id is not the first
        return Appended(offset)
    if digest == fact.digest:
        return Appended(offset, duplicate=True)
    return ConflictingDuplicate(fact.message_id, offset)


def _now() -> int:
    return time.time_ns() // 1_000_000
