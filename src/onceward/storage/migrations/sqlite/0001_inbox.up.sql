-- The registered consumers and their contracts.
CREATE TABLE onceward_consumers (
    consumer_id TEXT PRIMARY KEY,
    contract TEXT NOT NULL,
    registered_at REAL NOT NULL,
    updated_at REAL NOT NULL
);

-- One row for each event that a consumer has done. The day comes first, so a purge removes rows from one end.
CREATE TABLE onceward_dedup (
    event_day INTEGER NOT NULL,
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    payload_sha256 BLOB NOT NULL,
    processed_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT 'done',
    PRIMARY KEY (event_day, consumer_id, tracking_id)
) WITHOUT ROWID;

-- Starts, recorded before the handler runs, and ends. A start without an end is a crash.
CREATE TABLE onceward_attempts (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    event_day INTEGER NOT NULL,
    starts INTEGER NOT NULL,
    ends INTEGER NOT NULL,
    locked_until REAL,
    last_at REAL NOT NULL,
    last_error TEXT,
    PRIMARY KEY (consumer_id, tracking_id)
) WITHOUT ROWID;

-- Effects outside the database: the intent is recorded before the call, the outcome after it.
CREATE TABLE onceward_effects (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    name TEXT NOT NULL,
    event_day INTEGER NOT NULL,
    effect_key TEXT NOT NULL,
    lock_token INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('intended', 'done')),
    result BLOB,
    error TEXT,
    intended_at REAL NOT NULL,
    settled_at REAL,
    PRIMARY KEY (consumer_id, tracking_id, name)
) WITHOUT ROWID;

-- The last sequence number of each aggregate.
CREATE TABLE onceward_sequences (
    consumer_id TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    last_sequence INTEGER NOT NULL,
    tracking_id TEXT NOT NULL,
    PRIMARY KEY (consumer_id, aggregate_id)
) WITHOUT ROWID;

-- Events that arrived before their predecessors, and since when they have been waiting.
CREATE TABLE onceward_parked (
    consumer_id TEXT NOT NULL,
    aggregate_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    since REAL NOT NULL,
    PRIMARY KEY (consumer_id, aggregate_id, tracking_id)
) WITHOUT ROWID;

-- Events of an earlier day may have been purged, so they are never run.
CREATE TABLE onceward_horizons (
    consumer_id TEXT PRIMARY KEY,
    floor_day INTEGER NOT NULL
);

-- Records that no purge may remove. An empty tracking_id holds all records of the consumer.
CREATE TABLE onceward_holds (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    reason TEXT NOT NULL,
    operator TEXT NOT NULL,
    placed_at REAL NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id)
) WITHOUT ROWID;
