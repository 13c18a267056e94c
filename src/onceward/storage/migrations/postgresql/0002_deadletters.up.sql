-- All dead letters. The body is the delivered message, byte for byte, and part of the letter's identity: an id that
-- was used for two payloads makes two letters, and neither is lost.
CREATE TABLE onceward_dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer text NOT NULL,
    message_id text NOT NULL,
    origin text NOT NULL,
    event_type text NOT NULL,
    aggregate_id text,
    sequence bigint,
    event_at double precision,
    category text NOT NULL CHECK (category IN ('infrastructure', 'contract', 'business', 'poison')),
    reason text NOT NULL,
    error text NOT NULL,
    attempts bigint NOT NULL,
    deaths bigint NOT NULL DEFAULT 1,
    history text NOT NULL,
    body bytea NOT NULL,
    body_sha256 bytea NOT NULL,
    trace_id text,
    first_failed_at double precision NOT NULL,
    died_at double precision NOT NULL,
    keep_until double precision NOT NULL,
    hold text,
    status text NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'redriven', 'resolved', 'discarded')),
    rca_id bigint,
    redrive_id text,
    redrives bigint NOT NULL DEFAULT 0,
    rate bigint,
    available_at double precision,
    token bigint NOT NULL DEFAULT 0,
    lost bigint NOT NULL DEFAULT 0,
    locked_until double precision,
    settled_at double precision,
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
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    category text NOT NULL,
    root_cause text NOT NULL,
    fix_ref text NOT NULL,
    operator text NOT NULL,
    opened_at double precision NOT NULL,
    closed_at double precision,
    reopened bigint NOT NULL DEFAULT 0
);

CREATE TABLE onceward_redrives (
    id text PRIMARY KEY,
    rca_id bigint NOT NULL,
    consumer text NOT NULL,
    filter text NOT NULL,
    rate bigint NOT NULL,
    letters bigint NOT NULL,
    operator text NOT NULL,
    made_at double precision NOT NULL,
    last_at double precision NOT NULL,
    succeeded bigint NOT NULL DEFAULT 0,
    died_again bigint NOT NULL DEFAULT 0
);

CREATE INDEX onceward_redrives_by_consumer ON onceward_redrives (consumer, last_at);

-- When each redriven letter was delivered, to limit the rate per minute.
CREATE TABLE onceward_redrive_handouts (
    consumer text NOT NULL,
    at double precision NOT NULL,
    letter_id bigint NOT NULL
);

CREATE INDEX onceward_redrive_handouts_by_time ON onceward_redrive_handouts (consumer, at);

-- What operators did. Each row has the hash of the previous row.
CREATE TABLE onceward_audit (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at text NOT NULL,
    operator text NOT NULL,
    action text NOT NULL,
    details text NOT NULL,
    previous text NOT NULL UNIQUE,
    hash text NOT NULL UNIQUE
);

-- The length of the audit log, to detect rows missing at its end.
CREATE TABLE onceward_audit_head (
    one bigint PRIMARY KEY CHECK (one = 1),
    entries bigint NOT NULL,
    hash text NOT NULL
);

INSERT INTO onceward_audit_head (one, entries, hash) VALUES (1, 0, '0000000000000000000000000000000000000000000000000000000000000000');

CREATE FUNCTION onceward_audit_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit is append-only';
END
$$;

CREATE TRIGGER onceward_audit_is_not_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON onceward_audit
    FOR EACH STATEMENT EXECUTE FUNCTION onceward_audit_refuse();
