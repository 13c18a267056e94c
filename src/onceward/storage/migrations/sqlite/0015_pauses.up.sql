-- Every consumer that has run, and since when, by whom and why it is paused, if it is.
CREATE TABLE onceward_pauses (
    consumer_id TEXT NOT NULL,
    name TEXT NOT NULL,
    paused_at REAL,
    operator TEXT,
    reason TEXT,
    PRIMARY KEY (consumer_id, name)
);
