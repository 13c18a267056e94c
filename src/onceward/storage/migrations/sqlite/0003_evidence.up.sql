-- Evidence recorded by `onceward verify --record`. Rows are added, never changed.
CREATE TABLE onceward_evidence (
    evidence_id TEXT PRIMARY KEY,
    consumer_id TEXT NOT NULL,
    recorded_at REAL NOT NULL,
    passed INTEGER NOT NULL,
    code_digest TEXT NOT NULL,
    evidence TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX onceward_evidence_by_consumer ON onceward_evidence (consumer_id, recorded_at);
