-- Messages behind another one of their key, which may be many, among those that are ready, which may be many, too.
CREATE INDEX onceward_outbox_behind ON onceward_outbox (target, key, seq) WHERE state = 'behind';

-- What a relay looks at before it claims, by index only: see `onceward.outbox.statements`. A look is no transaction of more
-- than one statement, so a function has the settings.
CREATE FUNCTION onceward_outbox_look(
    OUT now double precision, OUT due double precision, OUT over double precision, OUT targets text
) LANGUAGE plpgsql STABLE SET search_path FROM CURRENT
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
BEGIN
    now := extract(epoch FROM clock_timestamp());
    due := (SELECT at FROM onceward_outbox WHERE state = 'delayed' ORDER BY at LIMIT 1);
    over := (SELECT at FROM onceward_outbox WHERE state = 'held' ORDER BY at LIMIT 1);
    targets := (
        WITH RECURSIVE found(target) AS (
            (SELECT target FROM onceward_outbox WHERE state = 'ready' ORDER BY target LIMIT 1)
            UNION ALL
            SELECT (
                SELECT next.target FROM onceward_outbox next WHERE next.state = 'ready' AND next.target > found.target
                ORDER BY next.target LIMIT 1
            )
            FROM found WHERE found.target IS NOT NULL
        )
        SELECT coalesce(json_agg(target), '[]') FROM found WHERE target IS NOT NULL
    );
END
$$;
