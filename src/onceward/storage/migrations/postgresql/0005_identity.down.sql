-- Every record returns to its day and its spelling. Those made since have the day of the event's own time.
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

ALTER TABLE onceward_dedup DROP CONSTRAINT onceward_dedup_place;

ALTER TABLE onceward_dedup DETACH PARTITION onceward_dedup_other;

ALTER TABLE onceward_dedup DROP COLUMN own_day;

CREATE TEMPORARY TABLE onceward_moving ON COMMIT DROP AS
SELECT d.own_day AS event_day, d.consumer_id, coalesce(s.spelling, d.tracking_id) AS tracking_id, d.payload_sha256,
    d.processed_at, d.outcome
FROM onceward_dedup_other d LEFT JOIN onceward_spellings s
    ON s.table_name = 'onceward_dedup' AND s.consumer_id = d.consumer_id AND s.tracking_id = d.tracking_id
UNION ALL
SELECT event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome FROM onceward_copies;

DROP TABLE onceward_dedup_other;

WITH gone AS (
    DELETE FROM onceward_dedup d USING onceward_spellings s
    WHERE s.table_name = 'onceward_dedup' AND s.consumer_id = d.consumer_id AND s.tracking_id = d.tracking_id
    RETURNING s.event_day, d.consumer_id, s.spelling, d.payload_sha256, d.processed_at, d.outcome)
INSERT INTO onceward_moving SELECT * FROM gone;

DO $$
DECLARE
    day bigint;
    part text;
BEGIN
    FOR day IN SELECT DISTINCT event_day FROM onceward_moving LOOP
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
SELECT event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome FROM onceward_moving
ON CONFLICT DO NOTHING;

UPDATE onceward_attempts SET tracking_id = s.spelling FROM onceward_spellings s
WHERE s.table_name = 'onceward_attempts' AND s.consumer_id = onceward_attempts.consumer_id AND s.tracking_id = onceward_attempts.tracking_id;

UPDATE onceward_effects SET tracking_id = s.spelling FROM onceward_spellings s
WHERE s.table_name = 'onceward_effects' AND s.consumer_id = onceward_effects.consumer_id AND s.tracking_id = onceward_effects.tracking_id AND s.name = onceward_effects.name;

UPDATE onceward_parked SET tracking_id = s.spelling FROM onceward_spellings s
WHERE s.table_name = 'onceward_parked' AND s.consumer_id = onceward_parked.consumer_id AND s.tracking_id = onceward_parked.tracking_id AND s.name = onceward_parked.aggregate_id;

UPDATE onceward_holds SET tracking_id = s.spelling FROM onceward_spellings s
WHERE s.table_name = 'onceward_holds' AND s.consumer_id = onceward_holds.consumer_id AND s.tracking_id = onceward_holds.tracking_id;

UPDATE onceward_dead_letters SET message_id = s.spelling FROM onceward_spellings s
WHERE s.table_name = 'onceward_dead_letters' AND s.consumer_id = onceward_dead_letters.consumer
    AND s.name = CAST(onceward_dead_letters.id AS text);

DROP TABLE onceward_copies;

DROP TABLE onceward_spellings;

DROP FUNCTION onceward_older_version;

DROP FUNCTION onceward_partition;
