-- A message that waits is not lost: with one, this way back fails, and the name of the constraint says why.
CREATE TEMPORARY TABLE onceward_no_message_waits (
    waiting integer,
    CONSTRAINT "messages wait in onceward_outbox: run onceward relay first" CHECK (waiting = 0)
);

INSERT INTO onceward_no_message_waits
SELECT count(*) FROM onceward_outbox WHERE state IN ('ready', 'delayed', 'held', 'behind', 'dead');

DROP TABLE onceward_no_message_waits;

DROP TABLE onceward_outbox;
