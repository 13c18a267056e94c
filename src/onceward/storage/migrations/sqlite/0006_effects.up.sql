-- An effect can be refused, which is certain, and its key can expire at the provider. SQLite cannot change a CHECK, so the
-- tables are copied.
CREATE TABLE onceward_effects_next (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    name TEXT NOT NULL,
    event_day INTEGER NOT NULL,
    effect_key TEXT NOT NULL,
    lock_token INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('intended', 'done', 'refused')),
    result BLOB,
    error TEXT,
    intended_at REAL NOT NULL,
    settled_at REAL,
    valid_for REAL,
    refusals INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer_id, tracking_id, name)
) WITHOUT ROWID;

INSERT INTO onceward_effects_next (
    consumer_id, tracking_id, name, event_day, effect_key, lock_token, state, result, error, intended_at, settled_at)
SELECT consumer_id, tracking_id, name, event_day, effect_key, lock_token, state, result, error, intended_at, settled_at
FROM onceward_effects;

DROP TABLE onceward_effects;

ALTER TABLE onceward_effects_next RENAME TO onceward_effects;

-- A letter whose effect is in doubt has a category of its own, and every letter names its event: a worker that does it
-- after all resolves the letter in the same transaction.
CREATE TABLE onceward_dead_letters_next (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer TEXT NOT NULL,
    message_id TEXT NOT NULL,
    origin TEXT NOT NULL,
    event_type TEXT NOT NULL,
    aggregate_id TEXT,
    sequence INTEGER,
    event_at REAL,
    category TEXT NOT NULL CHECK (category IN ('infrastructure', 'contract', 'business', 'in_doubt', 'poison')),
    reason TEXT NOT NULL,
    error TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    deaths INTEGER NOT NULL DEFAULT 1,
    history TEXT NOT NULL,
    body BLOB NOT NULL,
    body_sha256 BLOB NOT NULL,
    trace_id TEXT,
    first_failed_at REAL NOT NULL,
    died_at REAL NOT NULL,
    keep_until REAL NOT NULL,
    hold TEXT,
    status TEXT NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'redriven', 'resolved', 'discarded')),
    rca_id INTEGER,
    redrive_id TEXT,
    redrives INTEGER NOT NULL DEFAULT 0,
    rate INTEGER,
    available_at REAL,
    token INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0,
    locked_until REAL,
    settled_at REAL,
    owner TEXT,
    tracking_id TEXT,
    payload_sha256 BLOB,
    UNIQUE (consumer, message_id, body_sha256)
);

INSERT INTO onceward_dead_letters_next (
    id, consumer, message_id, origin, event_type, aggregate_id, sequence, event_at, category, reason, error,
    attempts, deaths, history, body, body_sha256, trace_id, first_failed_at, died_at, keep_until, hold, status,
    rca_id, redrive_id, redrives, rate, available_at, token, lost, locked_until, settled_at, owner)
SELECT
    id, consumer, message_id, origin, event_type, aggregate_id, sequence, event_at, category, reason, error,
    attempts, deaths, history, body, body_sha256, trace_id, first_failed_at, died_at, keep_until, hold, status,
    rca_id, redrive_id, redrives, rate, available_at, token, lost, locked_until, settled_at, owner
FROM onceward_dead_letters;

DELETE FROM sqlite_sequence WHERE name = 'onceward_dead_letters_next';

INSERT INTO sqlite_sequence (name, seq)
SELECT 'onceward_dead_letters_next', seq FROM sqlite_sequence WHERE name = 'onceward_dead_letters';

DROP TABLE onceward_dead_letters;

ALTER TABLE onceward_dead_letters_next RENAME TO onceward_dead_letters;

CREATE INDEX onceward_dead_letters_by_status ON onceward_dead_letters (status, consumer, event_type);

CREATE INDEX onceward_dead_letters_due ON onceward_dead_letters (consumer, available_at) WHERE status = 'redriven';

CREATE INDEX onceward_dead_letters_by_death ON onceward_dead_letters (consumer, died_at);

CREATE INDEX onceward_dead_letters_by_aggregate ON onceward_dead_letters (consumer, aggregate_id)
    WHERE status = 'open' AND aggregate_id IS NOT NULL;

CREATE INDEX onceward_dead_letters_by_rca ON onceward_dead_letters (rca_id) WHERE rca_id IS NOT NULL;

CREATE INDEX onceward_dead_letters_by_event ON onceward_dead_letters (consumer, tracking_id) WHERE status = 'open';
