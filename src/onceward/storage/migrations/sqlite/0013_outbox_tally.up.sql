-- What became of messages that are no longer in the outbox, and how many its relays have published: for `onceward balance`. Rows
-- are added, and added up when published messages are purged. `what` is published, canceled, or removed and the state that a
-- message had; every removal is counted, by whichever program.
CREATE TABLE onceward_outbox_tally (
    what TEXT NOT NULL,
    target TEXT NOT NULL,
    messages INTEGER NOT NULL
);

INSERT INTO onceward_outbox_tally (what, target, messages)
SELECT 'published', target, count(*) FROM onceward_outbox WHERE state = 'published' GROUP BY target;

CREATE TRIGGER onceward_outbox_counts_removed AFTER DELETE ON onceward_outbox
BEGIN
    INSERT INTO onceward_outbox_tally (what, target, messages) VALUES ('removed ' || OLD.state, OLD.target, 1);
END;
