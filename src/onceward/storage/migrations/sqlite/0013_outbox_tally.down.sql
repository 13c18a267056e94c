DROP TRIGGER onceward_outbox_counts_removed;

DROP TABLE onceward_outbox_tally;
