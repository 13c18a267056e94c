-- All dead letters. The body is the delivered message, byte for byte, and part of the letter's identity: an id that
-- was used for two payloads makes two letters, and neither is lost.
CREATE TABLE onceward_dead_letters (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer TEXT NOT NULL,
    message_id TEXT NOT NULL,
    origin TEXT NOT NULL,
    event_type TEXT NOT NULL,
    aggregate_id TEXT,
    sequence INTEGER,
    event_at REAL,
    category TEXT NOT NULL CHECK (category IN ('infrastructure', 'contract', 'business', 'poison')),
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
    UNIQUE (consumer, message_id, body_sha256)
);

CREATE INDEX onceward_dead_letters_by_status ON onceward_dead_letters (status, consumer, event_type);

CREATE INDEX onceward_dead_letters_due ON onceward_dead_letters (consumer, available_at) WHERE status = 'redriven';

CREATE INDEX onceward_dead_letters_by_death ON onceward_dead_letters (consumer, died_at);

CREATE INDEX onceward_dead_letters_by_aggregate ON onceward_dead_letters (consumer, aggregate_id)
    WHERE status = 'open' AND aggregate_id IS NOT NULL;

CREATE INDEX onceward_dead_letters_by_rca ON onceward_dead_letters (rca_id) WHERE rca_id IS NOT NULL;

-- Why letters died and how that was fixed. A redrive requires one.
CREATE TABLE onceward_rcas (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    category TEXT NOT NULL,
    root_cause TEXT NOT NULL,
    fix_ref TEXT NOT NULL,
    operator TEXT NOT NULL,
    opened_at REAL NOT NULL,
    closed_at REAL,
    reopened INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE onceward_redrives (
    id TEXT PRIMARY KEY,
    rca_id INTEGER NOT NULL,
    consumer TEXT NOT NULL,
    filter TEXT NOT NULL,
    rate INTEGER NOT NULL,
    letters INTEGER NOT NULL,
    operator TEXT NOT NULL,
    made_at REAL NOT NULL,
    last_at REAL NOT NULL,
    succeeded INTEGER NOT NULL DEFAULT 0,
    died_again INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX onceward_redrives_by_consumer ON onceward_redrives (consumer, last_at);

-- When each redriven letter was delivered, to limit the rate per minute.
CREATE TABLE onceward_redrive_handouts (
    consumer TEXT NOT NULL,
    at REAL NOT NULL,
    letter_id INTEGER NOT NULL
);

CREATE INDEX onceward_redrive_handouts_by_time ON onceward_redrive_handouts (consumer, at);

-- What operators did. Each row has the hash of the previous row.
CREATE TABLE onceward_audit (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    operator TEXT NOT NULL,
    action TEXT NOT NULL,
    details TEXT NOT NULL,
    previous TEXT NOT NULL UNIQUE,
    hash TEXT NOT NULL UNIQUE
);

-- The length of the audit log, to detect rows missing at its end.
CREATE TABLE onceward_audit_head (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    entries INTEGER NOT NULL,
    hash TEXT NOT NULL
);

INSERT INTO onceward_audit_head (one, entries, hash) VALUES (1, 0, '0000000000000000000000000000000000000000000000000000000000000000');

CREATE TRIGGER onceward_audit_is_not_changed BEFORE UPDATE ON onceward_audit
BEGIN
    SELECT RAISE(ABORT, 'the audit is append-only');
END;

CREATE TRIGGER onceward_audit_is_not_cut BEFORE DELETE ON onceward_audit
BEGIN
    SELECT RAISE(ABORT, 'the audit is append-only');
END;
