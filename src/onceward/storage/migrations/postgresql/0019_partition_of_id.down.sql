CREATE OR REPLACE FUNCTION onceward_partition(id text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN id ~ '^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$'
            AND substr(id, 1, 8) || substr(id, 10, 4) COLLATE "C" >= '018cc251f400'
            AND substr(id, 1, 8) || substr(id, 10, 4) COLLATE "C" < '024bce5cf000'
        THEN ('x' || substr(id, 1, 8) || substr(id, 10, 4))::bit(48)::bigint / 86400000 ELSE -1 END
$$;
