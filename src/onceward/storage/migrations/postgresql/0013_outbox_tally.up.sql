-- What became of messages that are no longer in the outbox, and how many its relays have published: for `onceward balance`. Rows
-- are added, so transactions do not wait for each other, and added up when published messages are purged. `what` is published,
-- canceled, or removed and the state that a message had; every removal is counted, by whichever program.
CREATE TABLE onceward_outbox_tally (
    what text NOT NULL,
    target text NOT NULL,
    messages bigint NOT NULL
);

INSERT INTO onceward_outbox_tally (what, target, messages)
SELECT 'published', target, count(*) FROM onceward_outbox WHERE state = 'published' GROUP BY target;

CREATE FUNCTION onceward_count_removed_messages() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'INSERT INTO ' || quote_ident(TG_TABLE_SCHEMA) || '.onceward_outbox_tally (what, target, messages) '
        || 'SELECT ''removed '' || state, target, count(*) FROM '
        || CASE TG_OP WHEN 'DELETE' THEN 'gone' ELSE quote_ident(TG_TABLE_SCHEMA) || '.onceward_outbox' END
        || ' GROUP BY state, target';
    RETURN NULL;
END
$$;

CREATE TRIGGER onceward_outbox_counts_removed AFTER DELETE ON onceward_outbox
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION onceward_count_removed_messages();

CREATE TRIGGER onceward_outbox_counts_truncated BEFORE TRUNCATE ON onceward_outbox
    FOR EACH STATEMENT EXECUTE FUNCTION onceward_count_removed_messages();
