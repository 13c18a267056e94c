-- What is down now: a consumer, or a dependency of several. One probe at a time, under a lease with a token.
-- Times of probes and leases are of the steady clock, the others in seconds since 1970.
CREATE TABLE onceward_outages (
    subject TEXT PRIMARY KEY,
    since REAL NOT NULL,
    reason TEXT NOT NULL,
    probes INTEGER NOT NULL,
    next_probe REAL NOT NULL,
    token INTEGER NOT NULL,
    held_until REAL
);
