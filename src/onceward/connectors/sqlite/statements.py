"""All SQL of the SQLite queue, by name.

These are for a file of its own. A named queue shares its file with other tables, and has the same ones under names of
its own: see `named`.

`visible_at` is 0 for a ready message, otherwise the end of its lease or delay by the clock of the queue (`CLOCK`);
`token` is set while it is leased. The index keeps a fetch at the cost of its batch, however many messages wait.
"""

from __future__ import annotations

import re
from functools import lru_cache

APPLICATION_ID = 0x6F6E6377
"""Marks a file as ours ("oncw"), so another program's database is not taken for a queue."""
SCHEMA_VERSION = 5

TALLIES = """
    CREATE TABLE tallies (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        appended INTEGER NOT NULL,
        done INTEGER NOT NULL,
        moved INTEGER NOT NULL
    )
"""
"""Counts messages that are no longer here. `moved` are dead letters that were moved elsewhere. So

    appended = messages + dead letters + done + moved

whatever crashes, and `onceward balance` detects one that was removed by hand."""
BEGIN_TALLIES = """
    INSERT INTO tallies SELECT 1, (SELECT count(*) FROM messages) + (SELECT count(*) FROM dead_letters), 0, 0
"""

ENDED = (
    """
    CREATE TABLE ended (
        seq INTEGER PRIMARY KEY,
        upto INTEGER NOT NULL,
        messages BLOB NOT NULL,
        enqueued_at REAL,
        digest BLOB
    )
    """,
    """
    CREATE TABLE forgotten (
        first_day INTEGER NOT NULL,
        last_day INTEGER NOT NULL,
        ids INTEGER NOT NULL,
        copies INTEGER NOT NULL,
        PRIMARY KEY (first_day, last_day)
    ) WITHOUT ROWID
    """,
)
"""Which messages ended: a row for those that ended together, or for one that was moved, with its digest. `upto` is how
many have ended with it. The last `KEPT` are here by id; those before, by their number."""
UNDATED = -1_000_000_000
"""The day of those that ended before ids were kept."""
BEGIN_ENDED = (
    f"INSERT INTO forgotten SELECT {UNDATED}, {UNDATED}, done + moved, 0 FROM tallies WHERE done + moved > 0"
)

CLOCK = """
    CREATE TABLE clock (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        boot TEXT NOT NULL,
        ahead REAL NOT NULL,
        since REAL NOT NULL
    )
"""
"""The clock of the queue is the time since the machine started plus `ahead`, which made it the wall clock at `since`.
So it is the same in all processes, and nobody can set it. `boot` names the start of the machine: after another one,
the clock continues from the wall clock, and the holders of leases are gone."""

SCHEMA = (
    """
    CREATE TABLE messages (
        seq INTEGER PRIMARY KEY,
        visible_at REAL NOT NULL DEFAULT 0,
        token INTEGER,
        deliveries INTEGER NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0,
        enqueued_at REAL NOT NULL,
        category TEXT,
        error TEXT,
        body BLOB NOT NULL,
        history TEXT NOT NULL DEFAULT ''
    )
    """,
    "CREATE INDEX messages_by_visible_at ON messages (visible_at)",
    """
    CREATE TABLE dead_letters (
        seq INTEGER PRIMARY KEY,
        transaction_id TEXT,
        reason TEXT NOT NULL,
        category TEXT,
        error TEXT,
        deliveries INTEGER NOT NULL,
        enqueued_at REAL NOT NULL,
        died_at REAL NOT NULL,
        body BLOB NOT NULL,
        history TEXT NOT NULL DEFAULT ''
    )
    """,
    TALLIES,
    BEGIN_TALLIES,
    *ENDED,
    CLOCK,
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

UPGRADES = {
    1: (
        "ALTER TABLE messages ADD COLUMN history TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE dead_letters ADD COLUMN history TEXT NOT NULL DEFAULT ''",
        "PRAGMA user_version = 2",
    ),
    2: (TALLIES, BEGIN_TALLIES, "PRAGMA user_version = 3"),
    3: (*ENDED, BEGIN_ENDED, "PRAGMA user_version = 4"),
    4: (CLOCK, "PRAGMA user_version = 5"),
}
"""From each version to the next."""

_TABLES = "messages|dead_letters|tallies|ended|forgotten|clock|turns|last_turn"
_WORDS = "TABLE|INTO|FROM|UPDATE|FAIL|ON|INDEX|JOIN|EXISTS|TRIGGER"
_TABLE = re.compile(rf"\b({_WORDS})(\s+)((?:{_TABLES})(?:_by_visible_at|_by_key|_leave)?)\b")


@lru_cache(500)
def named(statement: str, queue: str | None) -> str:
    """The statement for a queue of this name; None for the one of a file of its own."""
    return statement if queue is None else _TABLE.sub(rf"\1\2onceward_queue_{queue}_\3", statement)


QUEUES = "CREATE TABLE IF NOT EXISTS onceward_queues (name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
"""The named queues of a file, with the versions of their tables."""
READ_QUEUE_VERSION = "SELECT version FROM onceward_queues WHERE name = ?"
ADD_QUEUE = "INSERT INTO onceward_queues (name, version) VALUES (?, ?)"
SET_QUEUE_VERSION = "UPDATE onceward_queues SET version = ? WHERE name = ?"
READ_HAS_QUEUES = "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name = 'onceward_queues')"

READ_APPLICATION_ID = "PRAGMA application_id"
READ_USER_VERSION = "PRAGMA user_version"
READ_IS_EMPTY = "SELECT NOT EXISTS (SELECT 1 FROM sqlite_master)"
USE_WAL = "PRAGMA journal_mode = WAL"
USE_SYNCHRONOUS = "PRAGMA synchronous = {}"

BEGIN = "BEGIN IMMEDIATE"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"
SAVEPOINT = "SAVEPOINT in_one_go"
KEEP_SAVEPOINT = "RELEASE in_one_go"
UNDO_SAVEPOINT = "ROLLBACK TO in_one_go"

READ_CLOCK = "SELECT boot, ahead, since FROM clock"
BEGIN_CLOCK = """
    INSERT INTO clock (one, boot, ahead, since) VALUES (1, ?, ?, ?)
    ON CONFLICT DO UPDATE SET boot = excluded.boot, ahead = excluded.ahead, since = excluded.since
"""
END_LEASES = "UPDATE messages SET visible_at = :now WHERE visible_at > :now AND token IS NOT NULL"
END_DELAYS = """
    UPDATE messages SET visible_at = :now WHERE visible_at > :now AND visible_at < 9e999 AND token IS NULL
"""

DUE = "SELECT min(visible_at) FROM messages"
APPEND = "INSERT INTO messages (enqueued_at, body) VALUES (?, ?)"
ENTRANCE = (
    "CREATE TEMP VIEW IF NOT EXISTS entrance AS SELECT 0 AS enqueued_at, 0 AS body",
    """
    CREATE TEMP TRIGGER IF NOT EXISTS enter INSTEAD OF INSERT ON entrance BEGIN
        INSERT INTO messages (enqueued_at, body) VALUES (NEW.enqueued_at, NEW.body);
        UPDATE tallies SET appended = appended + 1;
    END
    """,
)
"""Of one connection, not in the file: `APPEND_ALONE` appends and counts a message in one statement."""
APPEND_ALONE = "INSERT INTO entrance (enqueued_at, body) VALUES (?, ?)"
APPEND_FOR = "INSERT INTO messages (enqueued_at, body, visible_at) VALUES (?, ?, ?)"

# SQLite stores any value in any column, so another program may have left a TEXT where a number or bytes belong. Each
# value is read as what it should be: one such row must not stop the rows behind it.
BODY = "coalesce(CAST(body AS BLOB), x'')"
_ROW = f"""
    seq, CAST(token AS INTEGER), max(CAST(deliveries AS INTEGER), 0),
    max(CAST(lost AS INTEGER), 0) + (token IS NOT NULL), {BODY}
"""
AVAILABLE_AGAIN = f"""
    SELECT {_ROW} FROM messages WHERE visible_at > 0 AND visible_at <= ? ORDER BY visible_at, seq LIMIT ?
"""
READY = f"SELECT {_ROW} FROM messages WHERE visible_at = 0 ORDER BY seq LIMIT ?"
STRANDED = f"""
    SELECT {_ROW} FROM messages
    WHERE seq IN (
        SELECT seq FROM messages WHERE visible_at < 0 UNION ALL SELECT seq FROM messages WHERE visible_at >= ''
    )
    ORDER BY seq LIMIT ?
"""
"""Rows with a `visible_at` that is not a time. In SQLite's order, text and bytes come after every number. With OR, it
would read all rows."""
PARKED = "9e999"
"""The `visible_at` of a message that waits in its line; infinity."""


def _leave(table: str, place: str) -> str:
    """A trigger: what leaves the table leaves its line, and if it was first, the next one is. Only the first of a line
    is not parked, so if it was not first, this wakes nobody."""
    return f"""
        CREATE TRIGGER IF NOT EXISTS {table}_leave AFTER DELETE ON {table} BEGIN
            UPDATE OR FAIL messages SET visible_at = 0 WHERE visible_at = {PARKED} AND seq = (
                SELECT seq FROM turns
                WHERE order_key = (SELECT order_key FROM turns WHERE seq = {place}) AND seq <> {place}
                ORDER BY turn LIMIT 1);
            DELETE FROM turns WHERE seq = {place};
        END
    """


LINES = (
    "CREATE TABLE IF NOT EXISTS turns (seq INTEGER PRIMARY KEY, turn INTEGER NOT NULL, order_key TEXT)",
    "CREATE INDEX IF NOT EXISTS turns_by_key ON turns (order_key, turn)",
    "CREATE TABLE IF NOT EXISTS last_turn (one INTEGER PRIMARY KEY CHECK (one = 1), turn INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO last_turn (one, turn) VALUES (1, 0)",
    _leave("messages", "OLD.seq"),
    _leave("dead_letters", "-OLD.seq"),
)
"""The lines of a queue whose consumer keeps order; created when the first one does. A dead letter that holds its line
has the place minus its own `seq`. SQLite may give the `seq` of a message that is gone to another, so the trigger, in
whichever transaction removes a message, takes it out of its line. Its UPDATE cannot fail, and says OR FAIL because
SQLite would otherwise copy each page before the statement that has the trigger changes it, in case it is undone."""
_FIRST = """
    EXISTS (SELECT 1 FROM turns AS t WHERE t.seq = m.seq AND (t.order_key IS NULL OR NOT EXISTS (
        SELECT 1 FROM turns AS e WHERE e.order_key = t.order_key AND e.turn < t.turn)))
"""
FIRST_AGAIN = AVAILABLE_AGAIN.replace("messages", "messages AS m").replace("ORDER", f"AND {_FIRST} ORDER")
_LINED_UP = "AND m.seq <= (SELECT max(seq) FROM turns)"
"""Without it, a search for heads would pass all messages that have not lined up yet."""
FIRST_READY = READY.replace("messages", "messages AS m").replace("ORDER", f"{_LINED_UP} AND {_FIRST} ORDER")
_NEW = "AND NOT EXISTS (SELECT 1 FROM turns AS t WHERE t.seq = m.seq)"
NEW_AGAIN = f"""
    SELECT {_ROW} FROM messages AS m WHERE visible_at > 0 AND visible_at <= ? {_NEW}
    ORDER BY visible_at, seq LIMIT ?
"""
NEW_READY = f"SELECT {_ROW} FROM messages AS m WHERE visible_at = 0 {_NEW} ORDER BY seq LIMIT ?"
TAKE_TURNS = "UPDATE last_turn SET turn = turn + ? RETURNING turn"
LINE_UP = "INSERT INTO turns (seq, turn, order_key) VALUES (?, ?, ?)"
TAKEN = "SELECT value FROM json_each(?) WHERE EXISTS (SELECT 1 FROM turns WHERE order_key = value)"
"""Which of these keys have a line."""
PARK = f"UPDATE messages SET visible_at = {PARKED} WHERE seq = ?"
HOLD_LINE = "UPDATE turns SET seq = -? WHERE seq = ?"
COUNT_BEHIND = "SELECT count(*) FROM turns WHERE order_key = ? AND seq > 0"
BEHIND = f"""
    SELECT {BODY} FROM turns AS t JOIN messages AS m ON m.seq = t.seq WHERE order_key = ? ORDER BY turn LIMIT ?
"""
LEASE = "UPDATE messages SET visible_at = ?, token = ?, deliveries = ?, lost = ? WHERE seq = ?"
EXTEND = "UPDATE messages SET visible_at = ? WHERE seq = ? AND token = ?"
RELEASE = """
    UPDATE messages SET visible_at = :now WHERE visible_at > :now AND token BETWEEN :first AND :last
"""
DATABASE_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"
REMOVE = "DELETE FROM messages WHERE seq = ? AND CAST(token AS INTEGER) IS ?"
REMOVE_FIRST = """
    DELETE FROM messages WHERE seq IN (SELECT value FROM json_each(?)) AND CAST(token AS INTEGER) IS ? RETURNING seq
"""
"""Several of one token."""
GIVE_BACK = """
    UPDATE messages SET visible_at = ?, token = NULL, deliveries = deliveries - 1
    WHERE seq = ? AND token = ?
"""
HASTEN = "UPDATE messages SET visible_at = 0 WHERE seq = ? AND token IS NULL AND visible_at > 0"
DELAY = """
    UPDATE messages SET visible_at = ?, token = NULL, category = ?, error = ?, history = history || ?
    WHERE seq = ? AND token = ?
"""
COPY_TO_DEAD_LETTERS = f"""
    INSERT INTO dead_letters
        (transaction_id, reason, category, error, deliveries, enqueued_at, died_at, body, history)
    SELECT ?, ?, coalesce(?, category), coalesce(?, error), deliveries, enqueued_at, ?, {BODY}, history || ?
    FROM messages WHERE seq = ? AND CAST(token AS INTEGER) IS ?
"""

COUNTS = """
    SELECT count(*) FILTER (WHERE visible_at <= :now),
           count(*) FILTER (WHERE visible_at > :now AND token IS NOT NULL),
           count(*) FILTER (WHERE visible_at > :now AND token IS NULL),
           (SELECT count(*) FROM dead_letters)
    FROM messages
"""
OLDEST = "SELECT enqueued_at FROM messages ORDER BY seq LIMIT 1"
DEAD_LETTERS = f"""
    SELECT seq, transaction_id, {BODY}, reason, category, error, deliveries, enqueued_at, died_at, history
    FROM dead_letters ORDER BY seq LIMIT ?
"""
FORGET_DEAD = "DELETE FROM dead_letters WHERE seq = ? AND died_at = ?"

COUNT_APPENDED = "UPDATE tallies SET appended = appended + ?"
COUNT_DONE = "UPDATE tallies SET done = done + ?"
COUNT_MOVED = "UPDATE tallies SET moved = moved + ?"
KEPT = 100_000
"""How many ids of ended messages are kept, at least; about five megabytes."""

NOTE_DONE = "INSERT INTO ended (upto, messages) SELECT done + moved, ? FROM tallies"
NOTE_MOVED = """
    INSERT INTO ended (upto, messages, enqueued_at, digest) SELECT done + moved, ?, ?, ? FROM tallies
"""
DEAD_LETTER = f"SELECT CAST(enqueued_at AS REAL), {BODY} FROM dead_letters WHERE seq = ? AND died_at = ?"
TO_FORGET = """
    SELECT seq, messages FROM ended
    WHERE seq = (SELECT min(seq) FROM ended) AND upto <= (SELECT done + moved FROM tallies) - ?
"""
FORGET = "DELETE FROM ended WHERE seq = ?"
COUNT_FORGOTTEN = """
    INSERT INTO forgotten (first_day, last_day, ids, copies) VALUES (?, ?, ?, ?)
    ON CONFLICT (first_day, last_day) DO UPDATE SET ids = ids + excluded.ids, copies = copies + excluded.copies
"""

TALLIED_SINCE = 3
"""The schema version that added the tallies."""
LISTED_SINCE = 4
"""The schema version that added the ids of ended messages."""
CLOCK_SINCE = 5
"""The schema version that added the clock."""
HELD = "SELECT (SELECT count(*) FROM messages), (SELECT count(*) FROM dead_letters)"
BALANCE = """
    SELECT
        appended,
        done,
        moved,
        (SELECT count(*) FROM messages) AS pending,
        (SELECT count(*) FROM messages WHERE deliveries = 0) AS untouched,
        (SELECT count(*) FROM dead_letters) AS dead
    FROM tallies
"""
ALL_ENDED = "SELECT messages, coalesce(enqueued_at, 0), digest FROM ended ORDER BY seq"
ALL_FORGOTTEN = "SELECT first_day, last_day, ids, copies FROM forgotten"
ALL_HELD = f"""
    SELECT {BODY}, CAST(enqueued_at AS REAL) FROM messages
    UNION ALL SELECT {BODY}, CAST(enqueued_at AS REAL) FROM dead_letters
"""
