"""The tables of all queues in a PostgreSQL database. The first connector to use the database creates them.

A claim writes only columns that no index has, and the pages have room for it, so it leaves nothing behind in the
indexes. Messages that wait for a time are in a table of their own: however many there are, a claim does not pass them.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from onceward._text import driver_message
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.exc import DBAPIError

VERSION = 1
LOCK_KEY = 0x6F6E_6377_7175_6575
"""Advisory lock for creating the tables: of processes that start at once, one creates them."""
WAITING = 0x6F6E_6377
"""The first half of the advisory lock that connectors share while they wait for messages. The second is the queue's."""
CHANNEL = "onceward_queue_"
"""The notifications of a queue have this name, and the MD5 of the queue's after it."""
BATCH = 1 << 20
"""Most messages of one append: they have one number of the sequence, and stay together."""

NOW = "extract(epoch FROM clock_timestamp())::double precision"
"""Seconds since 1970, by the server's clock. Leases and delays are measured by it."""

DENIED = "42501"
"""The SQLSTATE of a missing privilege."""

_CHURN = """
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0.1
"""
"""For a table whose every row is updated and deleted soon: room on each page for a second version of its rows, and a
vacuum that does not wait for a fifth of a large backlog."""

ROW = "queue, seq, enqueued_at, deliveries, lost, category, error, history, body"
"""The columns that a ready message and a delayed one have in common."""
_OF_MESSAGE = ", ".join(f"message.{column}" for column in ROW.split(", "))

_BY_KEY = """
    LANGUAGE plpgsql SET search_path FROM CURRENT
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
"""
"""A function that finds each row by its key: one row after another, and with these settings. A plan is kept, and one
from when the table was small, or a join, would read all rows of the queue."""


def next_due(schema: str, queue: str) -> str:
    """The SQL for the seconds until a delay or a lease is over. Of leases, only those of the oldest messages count."""
    return f"""
        SELECT least(
            (SELECT visible_at FROM {schema}onceward_queue_delayed WHERE queue = {queue} ORDER BY visible_at LIMIT 1),
            (SELECT min(leased_until) FROM (
                SELECT leased_until FROM {schema}onceward_queue_messages WHERE queue = {queue} ORDER BY seq LIMIT 1000
            ) AS oldest)
        ) - {NOW}
    """


LINES = (
    """
    CREATE TABLE IF NOT EXISTS onceward_queue_turns (
        queue text COLLATE "C" NOT NULL,
        seq bigint NOT NULL,
        turn bigint GENERATED ALWAYS AS IDENTITY,
        order_key text COLLATE "C",
        is_first boolean NOT NULL,
        dead bigint,
        PRIMARY KEY (queue, seq)
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)
    """,
    """
    CREATE INDEX IF NOT EXISTS onceward_queue_turns_by_key ON onceward_queue_turns (queue, order_key, turn)
    """,
    """
    CREATE INDEX IF NOT EXISTS onceward_queue_turns_first ON onceward_queue_turns (queue, seq) WHERE is_first
    """,
)
"""The lines of queues whose consumers keep order. `dead` is the number of the dead letter that holds its line."""

MOVE_DUE = f"""
    CREATE OR REPLACE FUNCTION onceward_queue_move_due(given_queue text, given_limit integer)
    RETURNS integer {_BY_KEY} AS $$
    DECLARE
        due record;
        message onceward_queue_delayed;
        moved integer := 0;
        moment double precision := {NOW};  -- a volatile function is no condition for an index
    BEGIN
        FOR due IN
            SELECT ctid AS place FROM onceward_queue_delayed WHERE queue = given_queue AND visible_at <= moment
            ORDER BY visible_at LIMIT given_limit FOR UPDATE SKIP LOCKED
        LOOP
            DELETE FROM onceward_queue_delayed WHERE ctid = due.place RETURNING * INTO message;
            INSERT INTO onceward_queue_messages ({ROW}) SELECT {_OF_MESSAGE} ON CONFLICT DO NOTHING;
            IF NOT FOUND THEN  -- somebody inserted a row by hand, with the number of another message
                message.seq := nextval('onceward_queue_batches') * {BATCH};
                INSERT INTO onceward_queue_messages ({ROW}) SELECT {_OF_MESSAGE};
            END IF;
            moved := moved + 1;
        END LOOP;
        RETURN moved;
    END $$
"""
"""A message is locked, so it stays at its place in the table. By its number it could be searched in the index of times,
past all that wait: with statistics of an emptied table that costs no more than the other index."""

CLAIM = f"""
    CREATE OR REPLACE FUNCTION onceward_queue_claim(
        given_queue text, given_limit integer, given_token bigint, given_lease double precision, given_after bigint
    ) RETURNS TABLE (found_seq bigint, found_body bytea, found_due double precision) {_BY_KEY} AS $$
    DECLARE
        message record;
        moment double precision;
        number integer := 0;
    BEGIN
        PERFORM onceward_queue_move_due(given_queue, given_limit);
        moment := {NOW};
        LOOP
            FOR message IN
                SELECT seq, token, deliveries, body FROM onceward_queue_messages
                WHERE queue = given_queue AND seq > given_after AND leased_until <= moment
                ORDER BY seq LIMIT given_limit FOR UPDATE SKIP LOCKED
            LOOP
                IF message.deliveries > 0 OR message.token IS NOT NULL THEN
                    EXIT WHEN number > 0;
                    found_due := -1;
                    RETURN NEXT;
                    RETURN;
                END IF;
                UPDATE onceward_queue_messages
                SET leased_until = moment + given_lease, token = given_token, deliveries = 1
                WHERE queue = given_queue AND seq = message.seq;
                number := number + 1;
                found_seq := message.seq;
                found_body := message.body;
                RETURN NEXT;
            END LOOP;
            EXIT WHEN number > 0 OR given_after < 0;
            given_after := -1;
        END LOOP;
        IF number = 0 THEN
            found_due := {{due}};
            RETURN NEXT;
        END IF;
    END $$
    """.replace("{due}", f"coalesce(({next_due('', 'given_queue')}), 'infinity')")
"""All of a fetch in one statement, as long as no message of it was delivered before: about those, the caller decides in
a transaction (`found_due` is -1 if the first is one). It begins after a given message, or else at the first one.
Without any, it says when there will be one."""

SCHEMA = (
    "CREATE TABLE onceward_queue_schema (version integer NOT NULL, id uuid NOT NULL)",
    f"INSERT INTO onceward_queue_schema VALUES ({VERSION}, gen_random_uuid())",
    "CREATE SEQUENCE onceward_queue_batches",
    f"""
    CREATE TABLE onceward_queue_messages (
        seq bigint NOT NULL,
        leased_until double precision NOT NULL DEFAULT 0,
        token bigint,
        enqueued_at double precision NOT NULL,
        deliveries integer NOT NULL DEFAULT 0,
        lost integer NOT NULL DEFAULT 0,
        queue text COLLATE "C" NOT NULL,
        category text,
        error text,
        history text NOT NULL DEFAULT '',
        body bytea NOT NULL,
        PRIMARY KEY (queue, seq)
    ) WITH ({_CHURN})
    """,
    """
    CREATE TABLE onceward_queue_delayed (
        seq bigint NOT NULL,
        visible_at double precision NOT NULL,
        enqueued_at double precision NOT NULL,
        deliveries integer NOT NULL DEFAULT 0,
        lost integer NOT NULL DEFAULT 0,
        queue text COLLATE "C" NOT NULL,
        category text,
        error text,
        history text NOT NULL DEFAULT '',
        body bytea NOT NULL,
        PRIMARY KEY (queue, seq)
    ) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000)
    """,
    "CREATE INDEX onceward_queue_delayed_by_time ON onceward_queue_delayed (queue, visible_at)",
    """
    CREATE TABLE onceward_queue_dead_letters (
        number bigint GENERATED ALWAYS AS IDENTITY,
        queue text COLLATE "C" NOT NULL,
        transaction_id text,
        reason text NOT NULL,
        category text,
        error text,
        deliveries integer NOT NULL,
        enqueued_at double precision NOT NULL,
        died_at double precision NOT NULL,
        body bytea NOT NULL,
        history text NOT NULL,
        PRIMARY KEY (queue, number)
    )
    """,
    # What was appended and what has ended, for `onceward balance`. Nobody updates a row, so nobody waits for another.
    """
    CREATE TABLE onceward_queue_log (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        queue text COLLATE "C" NOT NULL,
        appended integer NOT NULL DEFAULT 0,
        ended integer NOT NULL DEFAULT 0,
        messages bytea,
        enqueued_at double precision,
        digest bytea
    ) WITH (autovacuum_vacuum_scale_factor = 0.05)
    """,
    # The sums of the rows that have left the log.
    """
    CREATE TABLE onceward_queue_totals (
        queue text COLLATE "C" PRIMARY KEY,
        appended bigint NOT NULL,
        done bigint NOT NULL,
        moved bigint NOT NULL
    )
    """,
    """
    CREATE TABLE onceward_queue_forgotten (
        queue text COLLATE "C" NOT NULL,
        first_day integer NOT NULL,
        last_day integer NOT NULL,
        ids bigint NOT NULL,
        copies bigint NOT NULL,
        PRIMARY KEY (queue, first_day, last_day)
    )
    """,
    f"""
    CREATE FUNCTION onceward_queue_append(
        given_queue text, given_bodies bytea[], given_time double precision DEFAULT NULL
    ) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
    DECLARE
        first bigint := nextval('onceward_queue_batches') * {BATCH} - 1;
        number integer := coalesce(cardinality(given_bodies), 0);
    BEGIN
        IF number > {BATCH} THEN
            RAISE EXCEPTION USING MESSAGE = 'a queue takes at most {BATCH} messages at once, not ' || number;
        END IF;
        IF given_time IS NULL THEN
            INSERT INTO onceward_queue_messages (queue, seq, enqueued_at, body)
            SELECT given_queue, first + place, {NOW}, body
            FROM unnest(given_bodies) WITH ORDINALITY AS given (body, place);
        ELSE
            INSERT INTO onceward_queue_delayed (queue, seq, visible_at, enqueued_at, body)
            SELECT given_queue, first + place, given_time, {NOW}, body
            FROM unnest(given_bodies) WITH ORDINALITY AS given (body, place);
        END IF;
        INSERT INTO onceward_queue_log (queue, appended) VALUES (given_queue, number);
        -- All commits that notify wait for each other, so this is left out if nobody waits for messages.
        IF pg_try_advisory_lock({WAITING}, hashtext(given_queue)) THEN
            PERFORM pg_advisory_unlock({WAITING}, hashtext(given_queue));
        ELSE
            PERFORM pg_notify('{CHANNEL}' || md5(given_queue), '');
        END IF;
    END $$
    """,
    f"""
    CREATE FUNCTION onceward_queue_done(
        given_queue text, given_seq bigint, given_token bigint, given_message bytea
    ) RETURNS boolean {_BY_KEY} AS $$
    BEGIN
        DELETE FROM onceward_queue_messages
        WHERE queue = given_queue AND seq = given_seq AND token = given_token;
        IF NOT FOUND THEN
            RETURN false;
        END IF;
        INSERT INTO onceward_queue_log (queue, ended, messages) VALUES (given_queue, 1, given_message);
        RETURN true;
    END $$
    """,
    f"""
    CREATE FUNCTION onceward_queue_lease(
        given_queue text, given_seqs bigint[], given_deliveries integer[], given_lost integer[], given_token bigint,
        given_lease double precision
    ) RETURNS void {_BY_KEY} AS $$
    BEGIN
        FOR n IN 1 .. cardinality(given_seqs) LOOP
            UPDATE onceward_queue_messages
            SET leased_until = {NOW} + given_lease, token = given_token, deliveries = given_deliveries[n],
                lost = given_lost[n]
            WHERE queue = given_queue AND seq = given_seqs[n];
        END LOOP;
    END $$
    """,
    f"""
    CREATE FUNCTION onceward_queue_extend(
        given_queue text, given_seqs bigint[], given_tokens bigint[], given_lease double precision
    ) RETURNS SETOF bigint {_BY_KEY} AS $$
    BEGIN
        FOR n IN 1 .. cardinality(given_seqs) LOOP
            UPDATE onceward_queue_messages SET leased_until = {NOW} + given_lease
            WHERE queue = given_queue AND seq = given_seqs[n] AND token = given_tokens[n];
            IF FOUND THEN
                RETURN NEXT given_seqs[n];
            END IF;
        END LOOP;
    END $$
    """,
    f"""
    CREATE FUNCTION onceward_queue_remove(given_queue text, given_seqs bigint[], given_tokens bigint[])
    RETURNS SETOF bigint {_BY_KEY} AS $$
    BEGIN
        FOR n IN 1 .. cardinality(given_seqs) LOOP
            DELETE FROM onceward_queue_messages
            WHERE queue = given_queue AND seq = given_seqs[n] AND token = given_tokens[n];
            IF FOUND THEN
                RETURN NEXT given_seqs[n];
            END IF;
        END LOOP;
    END $$
    """,
    MOVE_DUE,
    CLAIM,
    *LINES,
)

TABLES = tuple(
    f"onceward_queue_{name}"
    for name in ("schema", "messages", "delayed", "dead_letters", "log", "totals", "forgotten", "turns")
)

_FIND = """
    SELECT quote_ident(n.nspname),
        to_regprocedure(quote_ident(n.nspname)
            || '.onceward_queue_claim(text, integer, bigint, double precision, bigint)') IS NOT NULL,
        current_setting('default_transaction_isolation') = 'read committed',
        (SELECT prosrc LIKE '%%ON CONFLICT%%' FROM pg_proc
            WHERE oid = to_regprocedure(quote_ident(n.nspname) || '.onceward_queue_move_due(text, integer)'))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass('onceward_queue_schema')
"""
_PLACE = """
    CAST((SELECT oid FROM pg_database WHERE datname = current_database()) AS text),
    CAST(extract(epoch FROM pg_postmaster_start_time()) AS text)
"""
WHICH_DATABASE = f"SELECT {_PLACE}"
IDENTITY = f"CAST(id AS text), {_PLACE}"
"""Tells two databases apart, also if one is a copy of the other."""


class QueueTables:
    """Where the tables are. `schema` is quoted, and `database` is what `IDENTITY` says."""

    def __init__(
        self,
        schema: str,
        database: tuple[str, ...],
        has_claim: bool,
        is_read_committed: bool,
        moves_today: bool,
    ) -> None:
        self.schema = schema
        self.database = database
        self.is_current = has_claim and moves_today
        """Whether the functions `CLAIM` and `MOVE_DUE` are there. Queues of an early onceward have others."""
        self.claims_at_once = has_claim and is_read_committed
        """Whether a claim may be one statement outside of a transaction."""


def creation_script(role: str = "") -> str:
    """The SQL that creates the tables of all queues, for psql. Run it as a role that may create tables, in the schema
    where the tables belong. With `role`, that one may then use the queues."""
    statements = [*SCHEMA]
    if role:
        quoted = '"' + role.replace('"', '""') + '"'
        statements += [
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(TABLES)} TO {quoted}",
            f"GRANT USAGE ON SEQUENCE onceward_queue_batches TO {quoted}",
        ]
    return "".join(f"{textwrap.dedent(each).strip()};\n" for each in ("BEGIN", *statements, "COMMIT"))


def find_tables(connection: Connection) -> QueueTables | None:
    """Return where the tables are; None if this database has none. Refuse those of a newer onceward."""
    found = connection.exec_driver_sql(_FIND).one_or_none()
    if found is None:
        return None
    schema, *can_claim = found
    version, *database = connection.exec_driver_sql(
        f"SELECT version, {IDENTITY} FROM {schema}.onceward_queue_schema"
    ).one()
    if version > VERSION:
        raise ConfigurationError(
            f"the queues of this database were created by a newer onceward (schema {version}; this one supports up to "
            f"{VERSION}); upgrade onceward"
        )
    return QueueTables(schema, tuple(database), *can_claim)


def create_tables(connection: Connection, place: str) -> QueueTables:
    """Create the tables, inside a transaction, unless another process has just done so."""
    from sqlalchemy.exc import DBAPIError

    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
    found = find_tables(connection)
    if found is not None:
        return found
    try:
        for statement in SCHEMA:
            connection.exec_driver_sql(statement)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != DENIED:
            raise
        raise _refusal(error, place) from error
    found = find_tables(connection)
    assert found is not None
    return found


def update_functions(connection: Connection, tables: QueueTables) -> QueueTables:
    """Give older tables the functions of today, inside a transaction. A role that may not do so uses what there is,
    with more statements for a claim."""
    from sqlalchemy.exc import DBAPIError

    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
    found = find_tables(connection)
    if found is None or found.is_current:
        return found or tables
    try:
        with connection.begin_nested():
            connection.exec_driver_sql(f"SET LOCAL search_path TO {tables.schema}")
            for function in (MOVE_DUE, CLAIM):
                connection.exec_driver_sql(function)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) != DENIED:
            raise
        return tables
    connection.exec_driver_sql("SET LOCAL search_path TO DEFAULT")
    return find_tables(connection) or tables


def _refusal(error: DBAPIError, place: str) -> ConfigurationError:
    return ConfigurationError(
        f"{place} has no tables for queues, and this role may not create them ({driver_message(error)}); have the "
        "owner of the database create them once, and grant this role the use of them: python -c 'from "
        'onceward.connectors.postgresql import creation_script; print(creation_script("ROLE"))\' | psql'
    )
