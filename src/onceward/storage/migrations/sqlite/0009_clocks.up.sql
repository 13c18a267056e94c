-- A row for each start of a machine. `ahead` is how far the database's clock was ahead of the time since that start, and
-- never changes: together they are a clock that nobody can set. `trusted_ahead` is the same by a time that was right, and
-- `trusted_at` the last one that was.
CREATE TABLE onceward_clocks (
    boot TEXT PRIMARY KEY,
    ahead REAL NOT NULL,
    trusted_ahead REAL,
    trusted_at REAL
);
