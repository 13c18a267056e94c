-- Messages that a transaction publishes. `state` is ready, delayed (until `at`), held (in flight, or after a failure, until
-- `at`), behind (an earlier message of its key is held), published, dead (to be moved to the dead letters) or moved. The
-- partial indexes keep a claim at the cost of its batch, however many messages are delayed or published.
CREATE TABLE onceward_outbox (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id text NOT NULL UNIQUE,
    target text NOT NULL,
    key text,
    state text NOT NULL,
    at double precision,
    token bigint,
    attempts integer NOT NULL DEFAULT 0,
    lost integer NOT NULL DEFAULT 0,
    failures integer NOT NULL DEFAULT 0,
    error text,
    history text NOT NULL DEFAULT '',
    digest bytea NOT NULL,
    body bytea NOT NULL,
    created_at double precision NOT NULL,
    ended_at double precision
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX onceward_outbox_ready ON onceward_outbox (target, seq) WHERE state = 'ready';

CREATE INDEX onceward_outbox_delayed ON onceward_outbox (at) WHERE state = 'delayed';

CREATE INDEX onceward_outbox_held ON onceward_outbox (at) WHERE state = 'held';

CREATE INDEX onceward_outbox_keys ON onceward_outbox (target, key, seq)
    WHERE key IS NOT NULL AND state IN ('ready', 'held', 'behind');

CREATE INDEX onceward_outbox_dead ON onceward_outbox (seq) WHERE state = 'dead';

CREATE INDEX onceward_outbox_ended ON onceward_outbox (ended_at) WHERE state IN ('published', 'moved');
