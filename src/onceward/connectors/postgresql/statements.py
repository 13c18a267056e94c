"""All SQL of the PostgreSQL queue, by name. `{s}` is the schema of its tables, quoted.

`leased_until` is 0 for a ready message, otherwise the end of its lease by the server's clock; `token` is set while
it is leased. Times that are given are seconds from now.
"""

from onceward.connectors.postgresql.schema import NOW, ROW, next_due

BEGIN = """
    SELECT set_config('lock_timeout', %s, true), set_config('enable_seqscan', 'off', true),
        set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true),
        set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
        set_config('enable_material', 'off', true),
        set_config('idle_in_transaction_session_timeout', '10000', true)
"""
"""Every statement here finds its rows by an index, and joins by looking up each row: other joins read all that wait in
line. A plan from when a table was small must do so, too: it is kept. And what is looked up for each row is a subquery
that locks, or one for the first of a range, for which there is one index: with statistics of an emptied table,
PostgreSQL would pass all of one table for each row of another. The server cuts off a process that is frozen here: it
would keep the rows that it has locked."""

APPEND = "SELECT {s}.onceward_queue_append(%s, %b::bytea[])"
"""%b: as text, the driver would write each byte with two characters, and search them for those to escape."""
APPEND_ALONE = "SELECT set_config('lock_timeout', %s, true), {s}.onceward_queue_append(%s, %b::bytea[])"
APPEND_ONE = APPEND_ALONE.replace("%b::bytea[]", "ARRAY[%b]::bytea[]")
"""Whole transactions in one round trip."""

READY = f"""
    SELECT seq, token, deliveries, lost + (token IS NOT NULL)::integer, body
    FROM {{s}}.onceward_queue_messages
    WHERE queue = %s AND seq > %s AND leased_until <= {NOW}
    ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED
"""
"""Skips what is leased, or being claimed by another."""


def _row(what: str, table: str, queue: str, value: str, number: str = "seq") -> str:
    """A subquery for a column of the row with this number. As the first one of a range, it can be found by one index
    only; for the row itself, PostgreSQL may take any index that begins with the queue."""
    return f"""(
        SELECT o.{what} FROM {{s}}.onceward_queue_{table} o
        WHERE o.queue = {queue} AND o.{number} >= {value} AND o.{number} <= {value} ORDER BY o.{number} LIMIT 1
    )"""


def _has_none(table: str, number: str, row: str, value: str) -> str:
    """The condition that a table has no row of this number, for a row of the same queue in another table."""
    return f"{_row(number, table, f'{row}.queue', f'{row}.{value}', number)} IS NULL"


FIRST_READY = f"""
    SELECT ready.* FROM {{s}}.onceward_queue_turns t, LATERAL (
        SELECT m.seq, m.token, m.deliveries, m.lost + (m.token IS NOT NULL)::integer, m.body
        FROM {{s}}.onceward_queue_messages m
        WHERE m.queue = t.queue AND m.seq = t.seq AND m.leased_until <= {NOW} FOR UPDATE SKIP LOCKED
    ) AS ready
    WHERE t.queue = %s AND t.is_first AND t.seq > %s ORDER BY t.seq LIMIT %s
"""
"""From the lines: a search in the queue would pass all messages that have not lined up yet."""
LOCK_LINES = "SELECT pg_advisory_xact_lock(hashtextextended('onceward_queue_turns ' || %s, 0))"
HAS_LINES = "SELECT to_regclass('{s}.onceward_queue_turns') IS NOT NULL"
LEAVE_LINES = f"""
    DELETE FROM {{s}}.onceward_queue_turns t WHERE queue = %s AND is_first
        AND {_has_none("messages", "seq", "t", "seq")}
        AND {_has_none("delayed", "seq", "t", "seq")}
        AND {_has_none("dead_letters", "number", "t", "dead")}
    RETURNING order_key
"""
"""Ends the places of those that are gone, and returns whose lines have no first one now."""
_NEAREST = """
    SELECT t.ctid FROM {s}.onceward_queue_turns t WHERE t.queue = %(queue)s AND t.order_key = given.order_key
    ORDER BY t.turn LIMIT 1
"""
"""The first one of a line. Without an order, it might be searched in all lines."""
COME_FIRST = f"""
    WITH nearest AS MATERIALIZED (
        SELECT ({_NEAREST}) AS place FROM unnest(%(keys)s::text[]) AS given (order_key)
    ), marked AS (
        UPDATE {{s}}.onceward_queue_turns t SET is_first = true
        WHERE t.ctid = ANY(ARRAY(SELECT place FROM nearest)) RETURNING t.seq
    ), gone AS (
        DELETE FROM {{s}}.onceward_queue_delayed d
        WHERE d.ctid = ANY(ARRAY(SELECT {_row("ctid", "delayed", "%(queue)s", "marked.seq")} FROM marked))
            AND (d.visible_at = 'infinity') IS TRUE
        RETURNING d.*
    )
    INSERT INTO {{s}}.onceward_queue_messages ({ROW}) SELECT {ROW} FROM gone
"""
"""By the places of rows, which nobody changes while this fetch has its turn: they wait. By their numbers, a plan for a
table of which PostgreSQL has no statistics read all that wait in line, from an index that begins with the queue."""
NEWCOMERS = f"""
    SELECT seq, token, deliveries, lost + (token IS NOT NULL)::integer, body FROM {{s}}.onceward_queue_messages
    WHERE queue = %s AND leased_until <= {NOW} AND {_has_none("turns", "seq", "onceward_queue_messages", "seq")}
    ORDER BY seq LIMIT %s FOR UPDATE SKIP LOCKED
"""
LINES_OF = f"""
    SELECT given.order_key FROM unnest(%(keys)s::text[]) AS given (order_key) WHERE ({_NEAREST}) IS NOT NULL
"""
"""Which of these keys have a line."""
LINE_UP = """
    INSERT INTO {s}.onceward_queue_turns (queue, seq, order_key, is_first)
    SELECT %s, given.seq, given.order_key, given.is_first
    FROM unnest(%s::bigint[], %s::text[], %s::boolean[]) AS given (seq, order_key, is_first)
"""
PARK = f"""
    WITH gone AS (
        DELETE FROM {{s}}.onceward_queue_messages WHERE queue = %s AND seq = ANY(%s::bigint[]) RETURNING *
    )
    INSERT INTO {{s}}.onceward_queue_delayed (visible_at, {ROW}) SELECT 'infinity', {ROW} FROM gone
"""
"""Those that wait in line are where no claim passes them, and their time never comes."""
HAS_PARKED = """
    SELECT EXISTS (SELECT 1 FROM {s}.onceward_queue_delayed WHERE queue = %s AND visible_at = 'infinity')
"""
UNPARK = f"""
    WITH gone AS (
        DELETE FROM {{s}}.onceward_queue_delayed WHERE queue = %s AND visible_at = 'infinity' RETURNING *
    )
    INSERT INTO {{s}}.onceward_queue_messages ({ROW}) SELECT {ROW} FROM gone
"""
END_LINES = "DELETE FROM {s}.onceward_queue_turns WHERE queue = %s"
HOLD_LINE = f"""
    UPDATE {{s}}.onceward_queue_turns SET dead = %(dead)s
    WHERE ctid = {_row("ctid", "turns", "%(queue)s", "%(seq)s::bigint")}
"""
"""Nobody else changes the row: it is first, and its message is not gone before this commits."""
COUNT_BEHIND = """
    SELECT count(*) FROM {s}.onceward_queue_turns WHERE queue = %s AND order_key = %s AND dead IS NULL
"""
BEHIND = f"""
    SELECT found.body FROM {{s}}.onceward_queue_turns t, LATERAL (
        SELECT coalesce({_row("body", "messages", "t.queue", "t.seq")}, {_row("body", "delayed", "t.queue", "t.seq")})
        OFFSET 0
    ) AS found (body)
    WHERE t.queue = %s AND t.order_key = %s AND t.dead IS NULL AND found.body IS NOT NULL
    ORDER BY t.turn LIMIT %s
"""
LEASE = "SELECT {s}.onceward_queue_lease(%s, %s::bigint[], %s::integer[], %s::integer[], %s, %s)"
MOVE_DUE = "SELECT {s}.onceward_queue_move_due(%s, %s)"
NEXT_DUE = next_due("{s}.", "%(queue)s")
CLAIM = """
    SELECT found.* FROM (SELECT set_config('synchronous_commit', 'off', true)) AS setting,
        LATERAL {s}.onceward_queue_claim(%s, %s, %s, %s, %s) AS found
"""
"""It does not wait for the disk. A worker that dies loses no claim. A server that dies does: those of the last half
second that nothing was committed after. Their messages are delivered as if for the first time."""
NOTIFY = "SELECT pg_notify(%s, '')"
EXTEND = "SELECT {s}.onceward_queue_extend(%s, %s::bigint[], %s::bigint[], %s)"
RELEASE = f"""
    UPDATE {{s}}.onceward_queue_messages SET leased_until = {NOW}
    WHERE queue = %s AND leased_until > {NOW} AND token BETWEEN %s AND %s
"""
REMOVE = "SELECT {s}.onceward_queue_remove(%s, %s::bigint[], %s::bigint[])"
LOG_DONE = "INSERT INTO {s}.onceward_queue_log (queue, ended, messages) VALUES (%s, %s, %s)"
DONE = "SELECT {s}.onceward_queue_done(:queue, :seq, :token, :message)"
"""With names of SQLAlchemy: it runs on connections of the application, whichever driver they have."""
REMOVE_ALL = """
    SELECT {s}.onceward_queue_remove(:queue, CAST(:seqs AS bigint[]), CAST(:tokens AS bigint[]))
"""
LOG_ALL = "INSERT INTO {s}.onceward_queue_log (queue, ended, messages) VALUES (:queue, :ended, :messages)"
GIVE_BACK = """
    UPDATE {s}.onceward_queue_messages SET leased_until = 0, token = NULL, deliveries = deliveries - 1
    WHERE queue = %s AND seq = %s AND token = %s
"""
HASTEN = f"""
    UPDATE {{s}}.onceward_queue_delayed SET visible_at = 0
    WHERE ctid = {_row("ctid", "delayed", "%(queue)s", "%(seq)s::bigint")}
"""
DELAY = f"""
    WITH gone AS (
        DELETE FROM {{s}}.onceward_queue_messages
        WHERE queue = %(queue)s AND seq = %(seq)s AND token = %(token)s RETURNING *
    )
    INSERT INTO {{s}}.onceward_queue_delayed
        (visible_at, queue, seq, enqueued_at, deliveries, lost, category, error, history, body)
    SELECT {NOW} + %(delay)s, queue, seq, enqueued_at, deliveries - %(uncounted)s, lost,
        coalesce(%(category)s, category), coalesce(%(error)s, error), history || %(history)s, body
    FROM gone
"""
BURY = f"""
    WITH gone AS (
        DELETE FROM {{s}}.onceward_queue_messages
        WHERE queue = %(queue)s AND seq = %(seq)s AND token IS NOT DISTINCT FROM %(token)s RETURNING *
    )
    INSERT INTO {{s}}.onceward_queue_dead_letters
        (queue, transaction_id, reason, category, error, deliveries, enqueued_at, died_at, body, history)
    SELECT queue, %(id)s, %(reason)s, coalesce(%(category)s, category), coalesce(%(error)s, error), deliveries,
        enqueued_at, {NOW}, body, history || %(history)s
    FROM gone RETURNING number
"""

COUNTS = f"""
    WITH moment AS MATERIALIZED (SELECT {NOW} AS now)
    SELECT
        (SELECT count(*) FROM {{s}}.onceward_queue_messages
            WHERE queue = %(queue)s AND leased_until <= (SELECT now FROM moment))
            + (SELECT count(*) FROM {{s}}.onceward_queue_delayed
                WHERE queue = %(queue)s AND visible_at <= (SELECT now FROM moment)),
        (SELECT count(*) FROM {{s}}.onceward_queue_messages
            WHERE queue = %(queue)s AND leased_until > (SELECT now FROM moment)),
        (SELECT count(*) FROM {{s}}.onceward_queue_delayed
            WHERE queue = %(queue)s AND visible_at > (SELECT now FROM moment)),
        (SELECT count(*) FROM {{s}}.onceward_queue_dead_letters WHERE queue = %(queue)s)
"""
"""At one moment: a message whose lease or delay ends meanwhile would be neither before nor after."""
OLDEST = f"""
    SELECT {NOW} - least(
        (SELECT enqueued_at FROM {{s}}.onceward_queue_messages WHERE queue = %(queue)s ORDER BY seq LIMIT 1),
        (SELECT enqueued_at FROM {{s}}.onceward_queue_delayed WHERE queue = %(queue)s ORDER BY seq LIMIT 1))
"""
DEAD_LETTERS = """
    SELECT number, transaction_id, body, reason, category, error, deliveries, enqueued_at, died_at, history
    FROM {s}.onceward_queue_dead_letters WHERE queue = %s ORDER BY number LIMIT %s
"""
FORGET_DEAD = """
    DELETE FROM {s}.onceward_queue_dead_letters WHERE queue = %s AND number = ANY(%s::bigint[])
    RETURNING enqueued_at, body
"""
LOG_MOVED = """
    INSERT INTO {s}.onceward_queue_log (queue, ended, messages, enqueued_at, digest) VALUES (%s, 1, %s, %s, %s)
"""

KEPT = 100_000
"""How many ids of ended messages of a queue are kept in its log, at least."""
OLDEST_KEPT = """
    SELECT number FROM (
        SELECT number, sum(ended) OVER (ORDER BY number DESC) - ended AS younger
        FROM {s}.onceward_queue_log WHERE queue = %(queue)s
    ) AS log
    WHERE younger >= %(kept)s ORDER BY number DESC LIMIT 1
"""
"""The youngest row of the log whose messages are not among the last `kept`."""
LOCK_LOG = "SELECT pg_try_advisory_xact_lock(hashtextextended('onceward_queue_log ' || %s, 0))"
LEAVE_LOG = """
    DELETE FROM {s}.onceward_queue_log WHERE queue = %s AND number <= %s RETURNING appended, ended, messages, digest
"""
ADD_TOTALS = """
    INSERT INTO {s}.onceward_queue_totals AS t (queue, appended, done, moved) VALUES (%s, %s, %s, %s)
    ON CONFLICT (queue) DO UPDATE SET
        appended = t.appended + excluded.appended, done = t.done + excluded.done, moved = t.moved + excluded.moved
"""
ADD_FORGOTTEN = """
    INSERT INTO {s}.onceward_queue_forgotten AS f (queue, first_day, last_day, ids, copies) VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (queue, first_day, last_day) DO UPDATE SET
        ids = f.ids + excluded.ids, copies = f.copies + excluded.copies
"""

TALLIES = """
    SELECT
        coalesce(sum(appended), 0), coalesce(sum(ended) FILTER (WHERE digest IS NULL), 0),
        coalesce(sum(ended) FILTER (WHERE digest IS NOT NULL), 0)
    FROM {s}.onceward_queue_log WHERE queue = %s
    UNION ALL SELECT appended, done, moved FROM {s}.onceward_queue_totals WHERE queue = %s
"""
ALL_ENDED = """
    SELECT messages, coalesce(enqueued_at, 0), digest FROM {s}.onceward_queue_log
    WHERE queue = %s AND ended > 0 ORDER BY number
"""
ALL_FORGOTTEN = """
    SELECT first_day, last_day, ids, copies FROM {s}.onceward_queue_forgotten WHERE queue = %s
"""
ALL_PENDING = """
    SELECT body, enqueued_at, deliveries FROM {s}.onceward_queue_messages WHERE queue = %s
    UNION ALL SELECT body, enqueued_at, deliveries FROM {s}.onceward_queue_delayed WHERE queue = %s
"""
ALL_DEAD = "SELECT body, enqueued_at FROM {s}.onceward_queue_dead_letters WHERE queue = %s"

UNLOGGED = r"""
    SELECT relname FROM pg_class
    WHERE relpersistence = 'u' AND relname LIKE 'onceward\_queue\_%%' AND relkind = 'r' AND pg_table_is_visible(oid)
    ORDER BY relname
"""
