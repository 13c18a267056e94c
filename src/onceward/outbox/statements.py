"""The SQL of the relay, by name. One statement serves both databases, except where a name ends in the database's.

`{now}` is the wall clock of the database, which decides when a delayed message is due; `{steady}` is for leases and
backoffs: see `onceward.storage.database`. `{seqs}` compares with a list of numbers. A clock that limits what is read is
inside a SELECT: PostgreSQL reads it once then, and uses the index up to there; otherwise it would ask for every row.
"""

from __future__ import annotations

SEQS = {
    "sqlite": "IN (SELECT value FROM json_each(:seqs))",
    "postgresql": "= ANY(CAST(:seqs AS bigint[]))",
}
SKIP_LOCKED = {"sqlite": "", "postgresql": "FOR UPDATE SKIP LOCKED"}
"""A row may be locked by a transaction that cancels it."""

LOCK_POSTGRESQL = """
    SELECT set_config('lock_timeout', '5000', true), set_config('idle_in_transaction_session_timeout', '10000', true),
        pg_advisory_xact_lock(:lock)
"""
"""Relays take their turns: what one puts behind a held message, the other must see when that is published. A relay that
is frozen inside its turn is cut off by the server."""

TARGETS = """
    WITH RECURSIVE found(target) AS (
        SELECT min(target) FROM onceward_outbox WHERE state = 'ready'
        UNION ALL
        SELECT (SELECT min(target) FROM onceward_outbox WHERE state = 'ready' AND target > found.target)
        FROM found WHERE found.target IS NOT NULL
    )
    SELECT target FROM found WHERE target IS NOT NULL
"""
"""Targets with a ready message, at the cost of one lookup each."""
LISTED = {
    "sqlite": "json_group_array(target)",
    "postgresql": "CAST(coalesce(json_agg(target), '[]') AS text)",
}
LOOK = TARGETS.replace(
    "SELECT target FROM found WHERE target IS NOT NULL",
    """SELECT {now} AS now, {steady} AS steady,
        (SELECT min(at) FROM onceward_outbox WHERE state = 'delayed') AS due,
        (SELECT min(at) FROM onceward_outbox WHERE state = 'held') AS over,
        (SELECT {listed} FROM found WHERE target IS NOT NULL) AS targets""",
)
"""All that a look needs, in one round trip: a message that wakes an idle relay waits for every one of them."""

PROMOTE_DUE = """
    UPDATE onceward_outbox SET state = 'ready', at = NULL,
        created_at = CASE WHEN at > created_at THEN at ELSE created_at END
    WHERE seq IN (
        SELECT seq FROM onceward_outbox WHERE state = 'delayed' AND at <= (SELECT {now}) ORDER BY at LIMIT :limit {skip}
    )
"""
PROMOTE_OVER = """
    UPDATE onceward_outbox SET state = 'ready', at = NULL, lost = lost + CASE WHEN token IS NULL THEN 0 ELSE 1 END,
        token = NULL
    WHERE seq IN (
        SELECT seq FROM onceward_outbox WHERE state = 'held' AND at <= (SELECT {steady}) ORDER BY at LIMIT :limit {skip}
    )
"""
"""One whose token is set was in flight: its lease has expired."""

CANDIDATES = """
    SELECT seq, key, lost FROM onceward_outbox WHERE state = 'ready' AND target = :target
    ORDER BY seq LIMIT :limit {skip}
"""
FIRST_OF_KEYS_POSTGRESQL = """
    SELECT wanted.key, first.seq, first.state
    FROM unnest(CAST(:keys AS text[]), CAST(:counts AS integer[])) AS wanted(key, count), LATERAL (
        SELECT seq, state FROM onceward_outbox
        WHERE target = :target AND key = wanted.key AND state IN ('ready', 'held', 'behind')
        ORDER BY seq LIMIT wanted.count
    ) AS first
"""
FIRST_OF_KEY_SQLITE = """
    SELECT key, seq, state FROM onceward_outbox
    WHERE target = ? AND key = ? AND key IS NOT NULL AND state IN ('ready', 'held', 'behind') ORDER BY seq LIMIT ?
"""
PUT_BEHIND = "UPDATE onceward_outbox SET state = 'behind' WHERE seq {seqs}"
CLAIM = """
    UPDATE onceward_outbox SET state = 'held', token = :token, attempts = attempts + 1,
        at = {steady} + CAST(:lease AS double precision)
    WHERE seq {seqs}
    RETURNING seq, message_id, key, attempts, lost, failures, body
"""

_OURS = "state = 'held' AND token = :token"
EXTEND = f"""
    UPDATE onceward_outbox SET at = {{steady}} + CAST(:lease AS double precision) WHERE seq {{seqs}} AND {_OURS}
"""
PUBLISH = f"""
    UPDATE onceward_outbox SET state = 'published', token = NULL, at = NULL, ended_at = {{now}}
    WHERE seq {{seqs}} AND {_OURS}
"""
GIVE_BACK = f"""
    UPDATE onceward_outbox SET state = 'ready', token = NULL, at = NULL, attempts = attempts - :uncount
    WHERE seq {{seqs}} AND {_OURS}
"""
FAIL = f"""
    UPDATE onceward_outbox SET token = NULL, at = {{steady}} + CAST(:delay AS double precision),
        failures = failures + 1, error = :error, history = history || :line
    WHERE seq = :seq AND {_OURS}
"""
BURY = f"""
    UPDATE onceward_outbox SET state = 'dead', token = NULL, at = NULL, failures = failures + 1, error = :error,
        history = history || :line, ended_at = {{now}}
    WHERE seq = :seq AND {_OURS}
"""
UNBLOCK_KEY_SQLITE = """
    UPDATE onceward_outbox SET state = 'ready' WHERE seq IN (
        SELECT seq FROM onceward_outbox WHERE target = ? AND key = ? AND key IS NOT NULL
            AND state IN ('ready', 'held', 'behind') AND state = 'behind'
        ORDER BY seq LIMIT ?
    )
"""
UNBLOCK_KEYS_POSTGRESQL = """
    UPDATE onceward_outbox SET state = 'ready' WHERE seq IN (
        SELECT next.seq FROM unnest(CAST(:keys AS text[])) AS wanted(key), LATERAL (
            SELECT seq FROM onceward_outbox WHERE target = :target AND key = wanted.key
                AND state IN ('ready', 'held', 'behind') AND state = 'behind'
            ORDER BY seq LIMIT :limit
        ) AS next
    )
"""
"""The next messages of these keys. The states are repeated for the sake of the partial index."""
UNBLOCK_STRANDED = """
    UPDATE onceward_outbox SET state = 'ready' WHERE seq IN (
        SELECT min(b.seq) FROM onceward_outbox b
        WHERE b.key IS NOT NULL AND b.state IN ('ready', 'held', 'behind') AND b.state = 'behind'
        GROUP BY b.target, b.key
        HAVING NOT EXISTS (
            SELECT 1 FROM onceward_outbox a WHERE a.target = b.target AND a.key = b.key AND a.key IS NOT NULL
                AND a.state IN ('ready', 'held')
        )
    )
"""
"""Nothing should need it, except a message that was canceled while others came to stand behind it."""

DEAD = """
    SELECT seq, message_id, target, key, attempts, failures, lost, error, history, body, created_at, ended_at
    FROM onceward_outbox WHERE state = 'dead' ORDER BY seq LIMIT :limit
"""
MOVED = "UPDATE onceward_outbox SET state = 'moved' WHERE seq {seqs} AND state = 'dead'"
RELEASE = """
    UPDATE onceward_outbox SET at = {steady} WHERE state = 'held' AND token BETWEEN :first AND :last AND at > {steady}
"""
PURGE = """
    DELETE FROM onceward_outbox WHERE seq IN (
        SELECT seq FROM onceward_outbox
        WHERE state IN ('published', 'moved') AND ended_at < (SELECT {now}) - CAST(:retention AS double precision)
        ORDER BY ended_at LIMIT :limit {skip}
    )
"""
TALLY_PUBLISHED = """
    INSERT INTO onceward_outbox_tally (what, target, messages) VALUES ('published', :target, :messages)
"""
ADD_UP_SQLITE = (
    """
    UPDATE onceward_outbox_tally SET messages = (
        SELECT sum(each.messages) FROM onceward_outbox_tally each
        WHERE each.what = onceward_outbox_tally.what AND each.target = onceward_outbox_tally.target
    )
    WHERE rowid IN (SELECT min(rowid) FROM onceward_outbox_tally GROUP BY what, target)
    """,
    """
    DELETE FROM onceward_outbox_tally
    WHERE rowid NOT IN (SELECT min(rowid) FROM onceward_outbox_tally GROUP BY what, target)
    """,
)
ADD_UP_POSTGRESQL = (
    """
    WITH found AS (DELETE FROM onceward_outbox_tally RETURNING what, target, messages)
    INSERT INTO onceward_outbox_tally (what, target, messages)
    SELECT what, target, sum(messages) FROM found GROUP BY what, target
    """,
)
BACKLOG = """
    SELECT count(*) AS waiting, {now} - min(created_at) AS age FROM onceward_outbox
    WHERE state IN ('ready', 'held', 'behind')
"""
