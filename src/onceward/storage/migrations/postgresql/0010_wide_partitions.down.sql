-- Every day has a partition of its own again.
LOCK TABLE onceward_dedup IN ACCESS EXCLUSIVE MODE;

DO $$
DECLARE
    part record;
    day bigint;
    own text;
BEGIN
    FOR part IN SELECT c.oid::regclass::text AS name, i.inhrelid, i.inhdetachpending
        FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'onceward_dedup'::regclass
        WHERE c.relkind = 'r' AND c.relname ~ '^onceward_dedup_[0-9]{8}_[0-9]{8}$'
            AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'onceward_dedup'::regclass)
    LOOP
        IF part.inhdetachpending THEN
            EXECUTE 'ALTER TABLE onceward_dedup DETACH PARTITION ' || part.name || ' FINALIZE';
        ELSIF part.inhrelid IS NOT NULL THEN
            EXECUTE 'ALTER TABLE onceward_dedup DETACH PARTITION ' || part.name;
        END IF;
        FOR day IN EXECUTE 'SELECT DISTINCT event_day FROM ' || part.name LOOP
            own := 'onceward_dedup_' || to_char(date '1970-01-01' + day::integer, 'YYYYMMDD');
            EXECUTE 'CREATE TABLE ' || own || ' PARTITION OF onceward_dedup FOR VALUES FROM (' || day || ') TO ('
                || day + 1 || ')';
        END LOOP;
        EXECUTE 'INSERT INTO onceward_dedup SELECT * FROM ' || part.name;
        EXECUTE 'DROP TABLE ' || part.name;
    END LOOP;
END
$$;
