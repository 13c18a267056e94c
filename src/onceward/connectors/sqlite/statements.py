"""All SQL of the SQLite queue, by name.

`visible_at` is 0 for a ready message, otherwise the end of its lease or delay; `token` is set while it is
leased. The index keeps a fetch at the cost of its batch, however many messages wait.
"""

APPLICATION_ID = 0x6F6E6377
"""Marks a file as ours ("oncw"), so another program's database is not taken for a queue."""
SCHEMA_VERSION = 3

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
}
"""From each version to the next."""

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

APPEND = "INSERT INTO messages (enqueued_at, body) VALUES (?, ?)"

AVAILABLE_AGAIN = """
    SELECT seq, token, deliveries, lost + (token IS NOT NULL), body FROM messages
    WHERE visible_at > 0 AND visible_at <= ? ORDER BY visible_at, seq LIMIT ?
"""
READY = """
    SELECT seq, token, deliveries, lost, body FROM messages
    WHERE visible_at = 0 ORDER BY seq LIMIT ?
"""
LEASE = "UPDATE messages SET visible_at = ?, token = ?, deliveries = deliveries + 1, lost = ? WHERE seq = ?"
EXTEND = "UPDATE messages SET visible_at = ? WHERE seq = ? AND token = ?"
RELEASE = """
    UPDATE messages SET visible_at = :now WHERE visible_at > :now AND token BETWEEN :first AND :last
"""
REMOVE = "DELETE FROM messages WHERE seq = ? AND token IS ?"
GIVE_BACK = """
    UPDATE messages SET visible_at = ?, token = NULL, deliveries = deliveries - 1
    WHERE seq = ? AND token = ?
"""
DELAY = """
    UPDATE messages SET visible_at = ?, token = NULL, category = ?, error = ?, history = history || ?
    WHERE seq = ? AND token = ?
"""
COPY_TO_DEAD_LETTERS = """
    INSERT INTO dead_letters
        (transaction_id, reason, category, error, deliveries, enqueued_at, died_at, body, history)
    SELECT ?, ?, coalesce(?, category), coalesce(?, error), deliveries, enqueued_at, ?, body, history || ?
    FROM messages WHERE seq = ? AND token IS ?
"""

COUNTS = """
    SELECT count(*) FILTER (WHERE visible_at <= :now),
           count(*) FILTER (WHERE visible_at > :now AND token IS NOT NULL),
           count(*) FILTER (WHERE visible_at > :now AND token IS NULL),
           (SELECT count(*) FROM dead_letters)
    FROM messages
"""
DEAD_LETTERS = """
    SELECT seq, transaction_id, body, reason, category, error, deliveries, enqueued_at, died_at, history
    FROM dead_letters ORDER BY seq LIMIT ?
"""
FORGET_DEAD = "DELETE FROM dead_letters WHERE seq = ? AND died_at = ?"

COUNT_APPENDED = "UPDATE tallies SET appended = appended + ?"
COUNT_DONE = "UPDATE tallies SET done = done + ?"
COUNT_MOVED = "UPDATE tallies SET moved = moved + ?"
TALLIED_SINCE = 3
"""The schema version that added the tallies."""
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
