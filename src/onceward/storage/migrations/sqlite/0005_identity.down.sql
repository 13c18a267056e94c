-- Every record returns to its day and its spelling. Those made since have the day of the event's own time.
DROP INDEX onceward_dedup_by_age;

ALTER TABLE onceward_dedup RENAME TO onceward_dedup_by_id;

CREATE TABLE onceward_dedup (
    event_day INTEGER NOT NULL,
    consumer_id TEXT NOT NULL,
    tracking_id TEXT NOT NULL,
    payload_sha256 BLOB NOT NULL,
    processed_at REAL NOT NULL,
    outcome TEXT NOT NULL DEFAULT 'done',
    PRIMARY KEY (event_day, consumer_id, tracking_id)
) WITHOUT ROWID;

INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome)
SELECT d.own_day, d.consumer_id, coalesce(s.spelling, d.tracking_id), d.payload_sha256, d.processed_at, d.outcome
FROM onceward_dedup_by_id d LEFT JOIN onceward_spellings s
    ON s.table_name = 'onceward_dedup' AND s.consumer_id = d.consumer_id AND s.tracking_id = d.tracking_id;

INSERT INTO onceward_dedup (event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome)
SELECT event_day, consumer_id, tracking_id, payload_sha256, processed_at, outcome FROM onceward_copies WHERE true
ON CONFLICT DO NOTHING;

DROP TABLE onceward_dedup_by_id;

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
