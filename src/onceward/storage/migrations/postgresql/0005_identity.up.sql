-- An event is identified by its consumer and its id alone, and a UUID is one id in every spelling.
LOCK TABLE onceward_dedup, onceward_kept, onceward_attempts, onceward_effects, onceward_parked, onceward_holds,
    onceward_dead_letters IN ACCESS EXCLUSIVE MODE;

-- Tables that an interrupted purge has detached return: they change like all others, and the next purge continues.
DO $$
DECLARE
    part record;
    day bigint;
BEGIN
    FOR part IN SELECT c.oid::regclass::text AS name, right(c.relname, 8) AS digits, i.inhrelid, i.inhdetachpending
        FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'onceward_dedup'::regclass
        WHERE c.relkind = 'r' AND c.relname ~ '^onceward_dedup_[0-9]{8}$'
            AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'onceward_dedup'::regclass)
            AND (i.inhrelid IS NULL OR i.inhdetachpending)
    LOOP
        IF part.inhdetachpending THEN
            EXECUTE 'ALTER TABLE onceward_dedup DETACH PARTITION ' || part.name || ' FINALIZE';
        END IF;
        day := to_date(part.digits, 'YYYYMMDD') - date '1970-01-01';
        EXECUTE 'ALTER TABLE onceward_dedup ATTACH PARTITION ' || part.name || ' FOR VALUES FROM (' || day || ') TO ('
            || day + 1 || ')';
    END LOOP;
END
$$;

-- The partition of an id: the day in a UUID of version 7 from 2024 to 2049, -1 for every other id. It depends on
-- nothing but the id, so the key of a partitioned table, which must contain the day, is still that of the id alone.
CREATE FUNCTION onceward_partition(id text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$'
            AND substr(id, 1, 8) || substr(id, 10, 4) COLLATE "C" >= '018cc251f400'
            AND substr(id, 1, 8) || substr(id, 10, 4) COLLATE "C" < '024bce5cf000'
        THEN ('x' || substr(id, 1, 8) || substr(id, 10, 4))::bit(48)::bigint / 86400000 ELSE -1 END
$$;

-- Every spelling of a UUID in the tables that is not the one in which it is stored from now on.
CREATE TEMPORARY TABLE onceward_respelled ON COMMIT DROP AS
WITH
    ids (id) AS (
        SELECT tracking_id FROM onceward_dedup UNION SELECT tracking_id FROM onceward_kept
        UNION SELECT tracking_id FROM onceward_attempts UNION SELECT tracking_id FROM onceward_effects
        UNION SELECT tracking_id FROM onceward_parked UNION SELECT tracking_id FROM onceward_holds
        UNION SELECT message_id FROM onceward_dead_letters
    ),
    unnamed (id, text) AS (
        SELECT id, regexp_replace(lower(btrim(id, U&' \00A0\1680\2000\2001\2002\2003\2004\2005\2006\2007\2008\2009\200A\2028\2029\202F\205F\3000')), '^urn:uuid:', '')
        FROM ids WHERE length(id) >= 32
    ),
    bare (id, text) AS (
        SELECT id, CASE WHEN left(text, 1) || right(text, 1) IN ('{}', '()')
            THEN substr(text, 2, length(text) - 2) ELSE text END
        FROM unnamed
    )
SELECT id AS spelling, CAST(CAST(text AS uuid) AS text) AS tracking_id FROM bare
WHERE CASE WHEN text ~ '^([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32})$'
    THEN CAST(CAST(text AS uuid) AS text) <> id ELSE false END;

CREATE INDEX ON onceward_respelled (spelling);

ANALYZE onceward_respelled;

-- The way back: which rows had another spelling before.
CREATE TABLE onceward_spellings (
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    table_name text NOT NULL,
    name text NOT NULL,
    event_day bigint,
    spelling text NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id, table_name, name)
);

-- The way back: further records of an event that was done on several days, or under several spellings.
CREATE TABLE onceward_copies (
    consumer_id text NOT NULL,
    tracking_id text NOT NULL,
    event_day bigint NOT NULL,
    payload_sha256 bytea NOT NULL,
    processed_at timestamptz NOT NULL,
    outcome text NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id, event_day)
);

-- The day of the event's own time, for an id that contains none.
ALTER TABLE onceward_dedup ADD COLUMN own_day bigint;

-- Ids that contain no day. A purge removes rows by the time at which they were done.
CREATE TABLE onceward_dedup_other (LIKE onceward_dedup INCLUDING ALL);

ALTER TABLE onceward_dedup_other ADD CONSTRAINT onceward_dedup_other_day CHECK (event_day >= -1 AND event_day < 0);

CREATE INDEX onceward_dedup_by_age ON onceward_dedup_other (consumer_id, processed_at);

CREATE TEMPORARY TABLE onceward_leaving ON COMMIT DROP AS
SELECT consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome FROM onceward_dedup LIMIT 0;

WITH gone AS (
    DELETE FROM onceward_dedup d WHERE event_day <> onceward_partition(tracking_id)
        OR EXISTS (SELECT 1 FROM onceward_respelled r WHERE r.spelling = d.tracking_id)
    RETURNING consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome)
INSERT INTO onceward_leaving SELECT * FROM gone;

WITH gone AS (
    DELETE FROM onceward_kept d WHERE event_day <> onceward_partition(tracking_id)
        OR EXISTS (SELECT 1 FROM onceward_respelled r WHERE r.spelling = d.tracking_id)
    RETURNING consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome)
INSERT INTO onceward_leaving SELECT * FROM gone g
WHERE NOT EXISTS (SELECT 1 FROM onceward_leaving l
    WHERE l.consumer_id = g.consumer_id AND l.tracking_id = g.tracking_id AND l.event_day = g.event_day);

-- If an event has several records, the first is the one that counts; one that is in its place already is not moved.
CREATE TEMPORARY TABLE onceward_moving ON COMMIT DROP AS
SELECT l.*, coalesce(r.tracking_id, l.tracking_id) AS identity,
    onceward_partition(coalesce(r.tracking_id, l.tracking_id)) AS place,
    row_number() OVER (PARTITION BY l.consumer_id, coalesce(r.tracking_id, l.tracking_id)
        ORDER BY l.processed_at, l.event_day, l.tracking_id) AS number
FROM onceward_leaving l LEFT JOIN onceward_respelled r ON r.spelling = l.tracking_id;

UPDATE onceward_moving m SET number = 2 FROM onceward_dedup d
WHERE m.number = 1 AND m.place >= 0 AND d.consumer_id = m.consumer_id AND d.tracking_id = m.identity AND d.event_day = m.place;

UPDATE onceward_moving m SET number = 2 FROM onceward_kept d
WHERE m.number = 1 AND m.place >= 0 AND d.consumer_id = m.consumer_id AND d.tracking_id = m.identity AND d.event_day = m.place;

INSERT INTO onceward_dedup_other (event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome, own_day)
SELECT -1, consumer_id, identity, payload_sha256, processed_at, outcome, event_day
FROM onceward_moving WHERE number = 1 AND place = -1 ORDER BY processed_at;

ALTER TABLE onceward_dedup ATTACH PARTITION onceward_dedup_other FOR VALUES FROM (-1) TO (0);

DO $$
DECLARE
    day bigint;
    part text;
BEGIN
    FOR day IN SELECT DISTINCT place FROM onceward_moving WHERE number = 1 AND place >= 0 LOOP
        part := 'onceward_dedup_' || to_char(date '1970-01-01' + day::integer, 'YYYYMMDD');
        IF to_regclass(part) IS NULL THEN
            EXECUTE 'CREATE TABLE ' || part || ' (LIKE onceward_dedup INCLUDING ALL)';
            EXECUTE 'ALTER TABLE ' || part || ' ADD CONSTRAINT ' || part || '_day CHECK (event_day >= ' || day
                || ' AND event_day < ' || day + 1 || ')';
        END IF;
        IF NOT EXISTS (SELECT 1 FROM pg_inherits
                WHERE inhparent = 'onceward_dedup'::regclass AND inhrelid = to_regclass(part)) THEN
            EXECUTE 'ALTER TABLE onceward_dedup ATTACH PARTITION ' || part || ' FOR VALUES FROM (' || day || ') TO ('
                || day + 1 || ')';
        END IF;
    END LOOP;
END
$$;

INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome)
SELECT place, consumer_id, identity, payload_sha256, processed_at, outcome
FROM onceward_moving WHERE number = 1 AND place >= 0;

INSERT INTO onceward_copies (consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome)
SELECT consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome
FROM onceward_moving WHERE number > 1;

INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, event_day, spelling)
SELECT consumer_id, identity, 'onceward_dedup', '', event_day, tracking_id
FROM onceward_moving WHERE number = 1 AND tracking_id <> identity;

-- A process of an older version would store an event by its day. It gets a serialization failure instead: it tries
-- again later, and loses nothing.
CREATE FUNCTION onceward_older_version() RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'this row is not in the partition of its id: an older version of onceward wrote it; stop that process'
        USING ERRCODE = 'serialization_failure';
END
$$;

ALTER TABLE onceward_dedup ADD CONSTRAINT onceward_dedup_place CHECK (
    CASE WHEN event_day = onceward_partition(tracking_id) AND (event_day >= 0 OR own_day IS NOT NULL) THEN true
    ELSE onceward_older_version() END);

-- Of rows that differ only in the spelling, one is respelled, and the others stay as they are: nothing is lost.
INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, event_day, spelling)
SELECT t.consumer_id, r.tracking_id, 'onceward_attempts', '', max(t.event_day), min(t.tracking_id)
FROM onceward_attempts t JOIN onceward_respelled r ON r.spelling = t.tracking_id
WHERE NOT EXISTS (SELECT 1 FROM onceward_attempts o
    WHERE o.consumer_id = t.consumer_id AND o.tracking_id = r.tracking_id)
GROUP BY t.consumer_id, r.tracking_id;

-- An effect that is done counts more than one in doubt.
INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, event_day, spelling)
SELECT t.consumer_id, r.tracking_id, 'onceward_effects', t.name, max(t.event_day),
    substr(min(t.state || ' ' || t.tracking_id), length(min(t.state)) + 2)
FROM onceward_effects t JOIN onceward_respelled r ON r.spelling = t.tracking_id
WHERE NOT EXISTS (SELECT 1 FROM onceward_effects o
    WHERE o.consumer_id = t.consumer_id AND o.tracking_id = r.tracking_id AND o.name = t.name)
GROUP BY t.consumer_id, r.tracking_id, t.name;

INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, spelling)
SELECT t.consumer_id, r.tracking_id, 'onceward_parked', t.aggregate_id, min(t.tracking_id)
FROM onceward_parked t JOIN onceward_respelled r ON r.spelling = t.tracking_id
WHERE NOT EXISTS (SELECT 1 FROM onceward_parked o
    WHERE o.consumer_id = t.consumer_id AND o.tracking_id = r.tracking_id AND o.aggregate_id = t.aggregate_id)
GROUP BY t.consumer_id, r.tracking_id, t.aggregate_id;

INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, spelling)
SELECT t.consumer_id, r.tracking_id, 'onceward_holds', '', min(t.tracking_id)
FROM onceward_holds t JOIN onceward_respelled r ON r.spelling = t.tracking_id
WHERE NOT EXISTS (SELECT 1 FROM onceward_holds o
    WHERE o.consumer_id = t.consumer_id AND o.tracking_id = r.tracking_id)
GROUP BY t.consumer_id, r.tracking_id;

INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, spelling)
SELECT t.consumer, r.tracking_id, 'onceward_dead_letters', CAST(t.id AS text), t.message_id
FROM onceward_dead_letters t JOIN onceward_respelled r ON r.spelling = t.message_id
WHERE NOT EXISTS (SELECT 1 FROM onceward_dead_letters o
    WHERE o.consumer = t.consumer AND o.body_sha256 = t.body_sha256 AND o.message_id = r.tracking_id)
    AND t.id = (SELECT min(o.id) FROM onceward_dead_letters o JOIN onceward_respelled q ON q.spelling = o.message_id
        WHERE o.consumer = t.consumer AND o.body_sha256 = t.body_sha256 AND q.tracking_id = r.tracking_id);

UPDATE onceward_attempts SET tracking_id = s.tracking_id FROM onceward_spellings s
WHERE s.table_name = 'onceward_attempts' AND s.consumer_id = onceward_attempts.consumer_id AND s.spelling = onceward_attempts.tracking_id;

UPDATE onceward_effects SET tracking_id = s.tracking_id FROM onceward_spellings s
WHERE s.table_name = 'onceward_effects' AND s.consumer_id = onceward_effects.consumer_id AND s.spelling = onceward_effects.tracking_id AND s.name = onceward_effects.name;

UPDATE onceward_parked SET tracking_id = s.tracking_id FROM onceward_spellings s
WHERE s.table_name = 'onceward_parked' AND s.consumer_id = onceward_parked.consumer_id AND s.spelling = onceward_parked.tracking_id AND s.name = onceward_parked.aggregate_id;

UPDATE onceward_holds SET tracking_id = s.tracking_id FROM onceward_spellings s
WHERE s.table_name = 'onceward_holds' AND s.consumer_id = onceward_holds.consumer_id AND s.spelling = onceward_holds.tracking_id;

UPDATE onceward_dead_letters SET message_id = s.tracking_id FROM onceward_spellings s
WHERE s.table_name = 'onceward_dead_letters' AND s.consumer_id = onceward_dead_letters.consumer
    AND s.name = CAST(onceward_dead_letters.id AS text);
