-- Limits of consumers for the whole fleet. Times are of the steady clock.
-- What each consumer is limited to, as the process that began last says.
CREATE TABLE onceward_limits (
    scope TEXT PRIMARY KEY,
    every double precision NOT NULL,
    concurrency INTEGER NOT NULL,
    by_what TEXT NOT NULL
);

-- One row for each key. The next start may be at next_at; messages that were given back come again until tail.
CREATE TABLE onceward_limit_keys (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    next_at double precision NOT NULL,
    tail double precision NOT NULL,
    held_for double precision,
    PRIMARY KEY (scope, key)
);

-- Slots that are taken, each under a lease.
CREATE TABLE onceward_limit_slots (
    token TEXT PRIMARY KEY,
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    owner TEXT,
    held_until double precision NOT NULL
);

CREATE INDEX onceward_limit_slots_by_key ON onceward_limit_slots (scope, key);
