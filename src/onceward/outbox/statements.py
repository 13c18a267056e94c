"""The SQL of the relay, by name. One statement serves both databases, except where a name ends in the database's.

`{now}` is the wall clock of the database, which decides when a delayed message is due; `{steady}` is for leases and
backoffs: see `onceward.storage.database`. `{seqs}` compares with a list of numbers. A clock that limits what is read is
inside a SELECT: PostgreSQL reads it once then, and uses the index up to there; otherwise it would ask for every row.

PostgreSQL plans by statistics, and those of this table are often wrong: from before a million rows came, or from while
they came, when it has many pages and no row. So no statement leaves a choice. Rows are found by an index
(`BY_INDEX_POSTGRESQL`) in a statement without a join, and changed by their numbers in another. Where the primary key
has the wanted order, too, and would pass all rows of the table, a value is given as a range: `target >= x AND target <=
x ORDER BY target, seq` is the order of one index only.
"""

from __future__ import annotations

SEQS = {
    "sqlite": "IN (SELECT value FROM json_each(:seqs))",
    "postgresql": "= ANY(CAST(:seqs AS bigint[]))",
}
SKIP_LOCKED = {"sqlite": "", "postgresql": "FOR UPDATE SKIP LOCKED"}
"""A row may be locked by a transaction that cancels it."""

BY_INDEX_POSTGRESQL = """
    SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
        set_config('enable_sort', 'off', true)
"""
"""For a transaction: have the planner use an index, also if it believes that the table is small."""
LOCK_POSTGRESQL = (
    BY_INDEX_POSTGRESQL.rstrip()
    + """,
        set_config('lock_timeout', '5000', true), set_config('idle_in_transaction_session_timeout', '10000', true),
        pg_advisory_xact_lock(:lock)
"""
)
"""Relays take their turns: what one puts behind a held message, the other must see when that is published. A relay that
is frozen inside its turn is cut off by the server."""

TARGETS = """
    WITH RECURSIVE found(target) AS (
        SELECT (SELECT target FROM onceward_outbox WHERE state = 'ready' ORDER BY target LIMIT 1)
        UNION ALL
        SELECT (
            SELECT next.target FROM onceward_outbox next WHERE next.state = 'ready' AND next.target > found.target
            ORDER BY next.target LIMIT 1
        )
        FROM found WHERE found.target IS NOT NULL
    )
    SELECT target FROM found WHERE target IS NOT NULL
"""
"""Targets with a ready message, at the cost of one lookup each."""
LOOK_SQLITE = TARGETS.replace(
    "SELECT target FROM found WHERE target IS NOT NULL",
    """SELECT {now} AS now, {steady} AS steady,
        (SELECT min(at) FROM onceward_outbox WHERE state = 'delayed') AS due,
        (SELECT min(at) FROM onceward_outbox WHERE state = 'held') AS over,
        (SELECT json_group_array(target) FROM found WHERE target IS NOT NULL) AS targets""",
)
LOOK_POSTGRESQL = "SELECT now, now AS steady, due, over, targets FROM onceward_outbox_look()"
"""All that a look needs, in one round trip: a message that wakes an idle relay waits for every one of them."""

DUE = """
    SELECT seq FROM onceward_outbox WHERE state = 'delayed' AND at <= (SELECT {now}) ORDER BY at LIMIT :limit {skip}
"""
PROMOTE_DUE = """
    UPDATE onceward_outbox SET state = 'ready', at = NULL,
        created_at = CASE WHEN at > created_at THEN at ELSE created_at END
    WHERE seq {seqs}
"""
OVER = """
    SELECT seq FROM onceward_outbox WHERE state = 'held' AND at <= (SELECT {steady}) ORDER BY at LIMIT :limit {skip}
"""
PROMOTE_OVER = """
    UPDATE onceward_outbox SET state = 'ready', at = NULL, lost = lost + CASE WHEN token IS NULL THEN 0 ELSE 1 END,
        token = NULL
    WHERE seq {seqs}
"""
"""One whose token is set was in flight: its lease has expired."""

CANDIDATES = """
    SELECT seq, key, lost FROM onceward_outbox WHERE state = 'ready' AND target >= :target AND target <= :target
    ORDER BY target, seq LIMIT :limit {skip}
"""
FIRST_OF_KEYS_POSTGRESQL = """
    SELECT wanted.key, first.seq, first.state
    FROM unnest(CAST(:keys AS text[]), CAST(:counts AS integer[])) AS wanted(key, count), LATERAL (
        SELECT seq, state FROM onceward_outbox
        WHERE target = :target AND key >= wanted.key AND key <= wanted.key AND state IN ('ready', 'held', 'behind')
        ORDER BY key, seq LIMIT wanted.count
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

_OURS = "token = :token"
"""Only a held message has a token. With its state in the condition, the index of what is held could be read instead of
the messages themselves."""
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
        SELECT seq FROM onceward_outbox WHERE target = ? AND key = ? AND state = 'behind' ORDER BY seq LIMIT ?
    )
"""
NEXT_OF_KEYS_POSTGRESQL = """
    SELECT next.seq FROM unnest(CAST(:keys AS text[])) AS wanted(key), LATERAL (
        SELECT seq FROM onceward_outbox
        WHERE target = :target AND key >= wanted.key AND key <= wanted.key AND state = 'behind'
        ORDER BY key, seq LIMIT :limit
    ) AS next
"""
BRING_FORWARD = "UPDATE onceward_outbox SET state = 'ready' WHERE seq {seqs}"
STRANDED_SQLITE = """
    SELECT min(b.seq) FROM onceward_outbox b WHERE b.state = 'behind'
    GROUP BY b.target, b.key
    HAVING NOT EXISTS (
        SELECT 1 FROM onceward_outbox a WHERE a.target = b.target AND a.key = b.key AND a.key IS NOT NULL
            AND a.state IN ('ready', 'held', 'behind') AND a.state IN ('ready', 'held')
    )
"""
STRANDED_POSTGRESQL = """
    WITH RECURSIVE first AS (
        (SELECT target, key, seq FROM onceward_outbox WHERE state = 'behind' ORDER BY target, key, seq LIMIT 1)
        UNION ALL
        SELECT next.target, next.key, next.seq FROM first, LATERAL (
            SELECT target, key, seq FROM onceward_outbox
            WHERE state = 'behind' AND (target, key) > (first.target, first.key) ORDER BY target, key, seq LIMIT 1
        ) AS next
    )
    SELECT seq FROM first WHERE seq = (
        SELECT a.seq FROM onceward_outbox a
        WHERE a.target = first.target AND a.key >= first.key AND a.key <= first.key AND a.key IS NOT NULL
            AND a.state IN ('ready', 'held', 'behind')
        ORDER BY a.key, a.seq LIMIT 1
    )
"""
"""Messages that stand behind none. Nothing should, except behind one that was canceled meanwhile."""

DEAD = """
    SELECT seq, message_id, target, key, attempts, failures, lost, error, history, body, created_at, ended_at
    FROM onceward_outbox WHERE state = 'dead' ORDER BY seq LIMIT :limit
"""
MOVED = "UPDATE onceward_outbox SET state = 'moved' WHERE seq {seqs} AND state = 'dead'"
RELEASE = """
    UPDATE onceward_outbox SET at = {steady} WHERE state = 'held' AND token BETWEEN :first AND :last AND at > {steady}
"""
OLD = """
    SELECT seq FROM onceward_outbox
    WHERE state IN ('published', 'moved') AND ended_at < (SELECT {now}) - CAST(:retention AS double precision)
    ORDER BY ended_at LIMIT :limit {skip}
"""
PURGE = "DELETE FROM onceward_outbox WHERE seq {seqs}"
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
WAITING = """
    SELECT target, count(*) AS messages FROM onceward_outbox WHERE state IN ('ready', 'held', 'behind') GROUP BY target
"""
BACKLOG = """
    SELECT sum(messages) AS waiting, {now} - min(first) AS age FROM (
        SELECT count(*) AS messages, min(created_at) AS first FROM onceward_outbox WHERE state = 'ready'
        UNION ALL SELECT count(*), min(created_at) FROM onceward_outbox WHERE state = 'held'
        UNION ALL SELECT count(*), min(created_at) FROM onceward_outbox WHERE state = 'behind'
    ) AS each
"""
"""Each state has an index. Of all messages that are delayed or published, this reads none."""
