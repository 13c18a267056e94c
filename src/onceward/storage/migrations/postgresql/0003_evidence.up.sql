-- Evidence recorded by `onceward verify --record`. Rows are added, never changed.
CREATE TABLE onceward_evidence (
    evidence_id text PRIMARY KEY,
    consumer_id text NOT NULL,
    recorded_at double precision NOT NULL,
    passed boolean NOT NULL,
    code_digest text NOT NULL,
    evidence text NOT NULL
);

CREATE INDEX onceward_evidence_by_consumer ON onceward_evidence (consumer_id, recorded_at);
