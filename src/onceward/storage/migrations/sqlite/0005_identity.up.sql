-- An event is identified by its consumer and its id alone, and a UUID is one id in every spelling.

-- Every spelling of a UUID in the tables that is not the one in which it is stored from now on. Each step is materialized:
-- SQLite would otherwise compute it again wherever the next one names it.
CREATE TEMPORARY TABLE onceward_respelled (
    spelling TEXT PRIMARY KEY,
    tracking_id TEXT NOT NULL
) WITHOUT ROWID;

INSERT INTO onceward_respelled (spelling, tracking_id)
WITH
    ids (id) AS (
        SELECT tracking_id FROM onceward_dedup UNION SELECT tracking_id FROM onceward_attempts
        UNION SELECT tracking_id FROM onceward_effects UNION SELECT tracking_id FROM onceward_parked
        UNION SELECT tracking_id FROM onceward_holds UNION SELECT message_id FROM onceward_dead_letters
    ),
    trimmed (id, text) AS MATERIALIZED (
        SELECT id, lower(trim(id, char(32, 160, 5760, 8192, 8193, 8194, 8195, 8196, 8197, 8198, 8199, 8200, 8201, 8202,
            8232, 8233, 8239, 8287, 12288)))
        FROM ids WHERE length(id) >= 32
            AND id NOT GLOB replace('????????-????-????-????-????????????', '?', '[0-9a-f]')
    ),
    unnamed (id, text) AS MATERIALIZED (
        SELECT id, CASE WHEN substr(text, 1, 9) = 'urn:uuid:' THEN substr(text, 10) ELSE text END FROM trimmed
    ),
    bare (id, text) AS MATERIALIZED (
        SELECT id, CASE WHEN substr(text, 1, 1) || substr(text, -1) IN ('{}', '()')
            THEN substr(text, 2, length(text) - 2) ELSE text END
        FROM unnamed
    ),
    digits (id, hex) AS MATERIALIZED (
        SELECT id, replace(text, '-', '') FROM bare
        WHERE length(text) = 32 OR text LIKE '________-____-____-____-____________'
    ),
    found (id, tracking_id) AS (
        SELECT id, substr(hex, 1, 8) || '-' || substr(hex, 9, 4) || '-' || substr(hex, 13, 4) || '-'
            || substr(hex, 17, 4) || '-' || substr(hex, 21)
        FROM digits WHERE length(hex) = 32 AND hex NOT GLOB '*[^0-9a-f]*'
    )
SELECT id, tracking_id FROM found WHERE id <> tracking_id;

-- The way back: which rows had another spelling before.
CREATE TABLE onceward_spellings (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    table_name TEXT NOT NULL,
    name TEXT NOT NULL,
    event_day INTEGER,
    spelling TEXT NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id, table_name, name)
) WITHOUT ROWID;

-- The way back: further records of an event that was done on several days, or under several spellings.
CREATE TABLE onceward_copies (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    event_day INTEGER NOT NULL,
    payload_sha256 BLOB NOT NULL,
    processed_at REAL NOT NULL,
    outcome TEXT NOT NULL,
    PRIMARY KEY (consumer_id, tracking_id, event_day)
) WITHOUT ROWID;

ALTER TABLE onceward_dedup RENAME TO onceward_dedup_by_day;

-- One row for each event that a consumer has done. own_day is the day of the event's own time. A purge may remove the row
-- when keep_day is past: the day in a UUID of version 7, otherwise the day on which it was done, or own_day if that is
-- later. Rows are added at the end of the table and of its index by age; only the key is in the order of the ids.
CREATE TABLE onceward_dedup (
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    own_day INTEGER NOT NULL,
    keep_day INTEGER NOT NULL,
    payload_sha256 BLOB NOT NULL,
    processed_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT 'done',
    PRIMARY KEY (consumer_id, tracking_id)
);

-- If an event has several records, the first is the one that counts.
CREATE TEMPORARY VIEW onceward_moving AS
SELECT d.*, coalesce(r.tracking_id, d.tracking_id) AS identity,
    row_number() OVER (PARTITION BY d.consumer_id, coalesce(r.tracking_id, d.tracking_id)
        ORDER BY d.processed_at, d.event_day, d.tracking_id) AS number
FROM onceward_dedup_by_day d LEFT JOIN onceward_respelled r ON r.spelling = d.tracking_id;

INSERT INTO onceward_dedup (consumer_id, tracking_id, own_day, keep_day, payload_sha256, processed_at, outcome)
SELECT consumer_id, identity, event_day, max(event_day, CAST(processed_at / 86400 AS INTEGER)), payload_sha256,
    processed_at, outcome
FROM onceward_moving WHERE number = 1;

CREATE INDEX onceward_dedup_by_age ON onceward_dedup (consumer_id, keep_day);

INSERT INTO onceward_copies (consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome)
SELECT consumer_id, tracking_id, event_day, payload_sha256, processed_at, outcome
FROM onceward_moving WHERE number > 1;

INSERT INTO onceward_spellings (consumer_id, tracking_id, table_name, name, event_day, spelling)
SELECT consumer_id, identity, 'onceward_dedup', '', event_day, tracking_id
FROM onceward_moving WHERE number = 1 AND tracking_id <> identity;

DROP VIEW onceward_moving;

DROP TABLE onceward_dedup_by_day;

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

DROP TABLE onceward_respelled;
