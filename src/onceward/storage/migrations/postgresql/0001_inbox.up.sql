-- The registered consumers and their contracts.
CREATE TABLE onceward_consumers (
    consumer_id text PRIMARY KEY,
    contract text NOT NULL,
    registered_at double precision NOT NULL,
    updated_at double precision NOT NULL
);

-- One row for each event that a consumer has done, in a partition for each day. The day is the event's own: a
-- duplicate that arrives on another day still finds the row. There is no default partition, so an event of a day
-- that was dropped fails instead of running again.
CREATE TABLE onceward_dedup (
    event_day bigint NOT NULL,
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    payload_sha256 bytea NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    outcome text NOT NULL DEFAULT 'done',
    PRIMARY KEY (consumer_id, tracking_id, event_day)
) PARTITION BY RANGE (event_day);

-- Rows on hold whose partition has been dropped.
CREATE TABLE onceward_kept (
    event_day bigint NOT NULL,
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    payload_sha256 bytea NOT NULL,
    processed_at timestamptz NOT NULL,
    outcome text NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id, event_day)
);

-- Starts, recorded before the handler runs, and ends. A start without an end is a crash.
CREATE TABLE onceward_attempts (
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    event_day bigint NOT NULL,
    starts bigint NOT NULL,
    ends bigint NOT NULL,
    locked_until double precision,
    last_at double precision NOT NULL,
    last_error text,
    PRIMARY KEY (consumer_id, tracking_id)
);

-- Effects outside the database: the intent is recorded before the call, the outcome after it.
CREATE TABLE onceward_effects (
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    name text NOT NULL,
    event_day bigint NOT NULL,
    effect_key text NOT NULL,
    lock_token bigint NOT NULL,
    state text NOT NULL CHECK (state IN ('intended', 'done')),
    result bytea,
    error text,
    intended_at double precision NOT NULL,
    settled_at double precision,
    PRIMARY KEY (consumer_id, tracking_id, name)
);

-- The last sequence number of each aggregate.
CREATE TABLE onceward_sequences (
    consumer_id text NOT NULL,
    aggregate_id text NOT NULL,
    last_sequence bigint NOT NULL,
    tracking_id text NOT NULL,
    PRIMARY KEY (consumer_id, aggregate_id)
);

-- Events that arrived before their predecessors, and since when they have been waiting.
CREATE TABLE onceward_parked (
    consumer_id text NOT NULL,
    aggregate_id text NOT NULL,
    tracking_id text NOT NULL,
    sequence bigint NOT NULL,
    since double precision NOT NULL,
    PRIMARY KEY (consumer_id, aggregate_id, tracking_id)
);

-- Events of an earlier day may have been purged, so they are never run.
CREATE TABLE onceward_horizons (
    consumer_id text PRIMARY KEY,
    floor_day bigint NOT NULL
);

-- Records that no purge may remove. An empty tracking_id holds all records of the consumer.
CREATE TABLE onceward_holds (
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    reason text NOT NULL,
    operator text NOT NULL,
    placed_at double precision NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id)
);
