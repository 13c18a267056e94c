"""The tables of a boundary on PostgreSQL. The first server to open a database creates them."""

from __future__ import annotations

from typing import Any

import psycopg

from onceward.errors import ConfigurationError

VERSION = 4
LOCK_KEY = 0x6F6E_6365_7761_7264  # "onceward"
"""Advisory lock for creating the tables: of servers that start at once, one creates them."""

ROW_BYTES = 200
"""Approximate size of a fact in addition to its record: the rest of its row, and three indexes."""

APPEND = f"""
    CREATE FUNCTION onceward_boundary_append(
        ids text[], digests bytea[], records bytea[], streams text[], times bigint[], limits bigint[]
    ) RETURNS TABLE (message_id text, "offset" bigint, digest bytea) LANGUAGE plpgsql AS $$
    #variable_conflict use_column
    BEGIN
        -- A statement sees what was committed before it began. So the lock comes before, not in it.
        PERFORM FROM onceward_boundary_log FOR UPDATE;
        RETURN QUERY WITH known AS MATERIALIZED (
            SELECT message_id, "offset", digest FROM onceward_boundary_facts WHERE message_id = ANY(ids)
        ), new AS (
            SELECT *,
                sum(octet_length(record) + {ROW_BYTES}) OVER (ORDER BY place ROWS UNBOUNDED PRECEDING) AS bytes_so_far
            FROM unnest(ids, digests, records, streams, times, limits)
                WITH ORDINALITY AS given (message_id, digest, record, stream, appended_at, within, place)
            WHERE message_id NOT IN (SELECT message_id FROM known)
        ), added AS (
            INSERT INTO onceward_boundary_facts AS facts (message_id, digest, record, stream, appended_at, "offset")
            SELECT message_id, digest, record, stream, appended_at,
                (SELECT last FROM onceward_boundary_log) + row_number() OVER (ORDER BY place)
            FROM new
            WHERE within IS NULL OR (SELECT bytes FROM onceward_boundary_log) + bytes_so_far <= within
            RETURNING facts.message_id, facts."offset", octet_length(record) + {ROW_BYTES} AS bytes
        ), counted AS (
            UPDATE onceward_boundary_log SET
                last = last + (SELECT count(*) FROM added),
                bytes = bytes + (SELECT coalesce(sum(bytes), 0) FROM added)
        )
        SELECT message_id, "offset", NULL::bytea FROM added UNION ALL SELECT message_id, "offset", digest FROM known;
    END $$
"""
"""Appends facts with distinct ids. Returns the offset of each, and its digest if it existed before; nothing for one
that does not fit, nor for those after it.

A function, because the lock is then held no longer than PostgreSQL needs: not while one statement's answer and the next
statement cross the network, nor while a boundary's server is frozen between the two."""

USAGE = (
    # One row: how many objects there are, and how many bytes all chunks have, also those of unfinished uploads.
    "CREATE TABLE onceward_boundary_usage (objects bigint NOT NULL, bytes bigint NOT NULL)",
    """
    INSERT INTO onceward_boundary_usage SELECT (SELECT count(*) FROM onceward_boundary_objects),
        (SELECT coalesce(sum(octet_length(data)), 0) FROM onceward_boundary_chunks)
    """,
)
TRUSTED = "ALTER TABLE onceward_boundary_log ADD trusted_time text"

HOLES = (
    "ALTER TABLE onceward_boundary_log ADD removals bigint NOT NULL DEFAULT 0",
    "ALTER TABLE onceward_boundary_cursors ADD after_removal bigint NOT NULL DEFAULT 0",
    """
    CREATE TABLE onceward_boundary_holes (
        last bigint PRIMARY KEY,
        first bigint NOT NULL,
        removal bigint NOT NULL
    )
    """,
)
"""Which removal left each hole, and the last one before each name."""

SCHEMA = (
    "CREATE TABLE onceward_boundary_schema (version integer NOT NULL)",
    f"INSERT INTO onceward_boundary_schema VALUES ({VERSION})",
    # One row. An append holds its lock until the commit is done, so offsets are in commit order.
    "CREATE TABLE onceward_boundary_log (last bigint NOT NULL, bytes bigint NOT NULL)",
    "INSERT INTO onceward_boundary_log VALUES (0, 0)",
    TRUSTED,
    """
    CREATE TABLE onceward_boundary_facts (
        "offset" bigint PRIMARY KEY,
        message_id text COLLATE "C" NOT NULL UNIQUE,
        digest bytea NOT NULL,
        record bytea NOT NULL,
        stream text COLLATE "C" NOT NULL,
        appended_at bigint NOT NULL
    )
    """,
    # Not compressed: a fact takes exactly as many bytes as it has, and no time.
    "ALTER TABLE onceward_boundary_facts ALTER record SET STORAGE EXTERNAL",
    "CREATE INDEX onceward_boundary_facts_by_age ON onceward_boundary_facts (stream, appended_at)",
    APPEND,
    """
    CREATE TABLE onceward_boundary_cursors (
        name text COLLATE "C" PRIMARY KEY,
        position bigint NOT NULL,
        confirmed_at bigint
    )
    """,
    """
    CREATE TABLE onceward_boundary_objects (
        bucket text COLLATE "C",
        key text COLLATE "C",
        digest text NOT NULL,
        size bigint NOT NULL,
        media_type text NOT NULL,
        content bigint NOT NULL,
        PRIMARY KEY (bucket, key)
    )
    """,
    "CREATE TABLE onceward_boundary_uploads (content bigserial PRIMARY KEY, begun_at timestamptz DEFAULT now())",
    """
    CREATE TABLE onceward_boundary_chunks (
        content bigint,
        number integer,
        data bytea NOT NULL,
        PRIMARY KEY (content, number)
    )
    """,
    "ALTER TABLE onceward_boundary_chunks ALTER data SET STORAGE EXTERNAL",
    *USAGE,
    *HOLES,
)

UPGRADES = {
    1: (APPEND, *USAGE, "UPDATE onceward_boundary_schema SET version = 2"),
    2: (TRUSTED, "UPDATE onceward_boundary_schema SET version = 3"),
    3: (*HOLES, "UPDATE onceward_boundary_schema SET version = 4"),
}
"""From each version to the next. Servers of an old version that are running continue to work: what they call stays."""


async def prepare(connection: psycopg.AsyncConnection[Any]) -> None:
    """Create the tables unless they exist. Refuse those of a newer onceward."""
    await _check_encoding(connection)
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
        if await answer_of(connection, "SELECT to_regclass('onceward_boundary_schema')") is None:
            for statement in SCHEMA:
                await connection.execute(statement)
            return
        version = await answer_of(connection, "SELECT version FROM onceward_boundary_schema")
        for older in range(version, VERSION):
            for statement in UPGRADES[older]:
                await connection.execute(statement)
    if version > VERSION:
        raise ConfigurationError(
            f"the boundary's tables in database {connection.info.dbname!r} were created by a newer onceward (schema "
            f"{version}, this one supports {VERSION}); upgrade this one, or give it its own database"
        )


async def _check_encoding(connection: psycopg.AsyncConnection[Any]) -> None:
    encoding = await answer_of(connection, "SHOW server_encoding")
    if encoding != "UTF8":
        raise ConfigurationError(
            f"database {connection.info.dbname!r} has the encoding {encoding}, which cannot represent every id and "
            "name; a boundary needs one created with ENCODING 'UTF8'"
        )


async def answer_of(connection: psycopg.AsyncConnection[Any], query: str, *values: Any) -> Any:
    """Return the first value of the first row; None if there is none."""
    row = await (await connection.execute(query, values)).fetchone()
    return row and row[0]
