DROP TRIGGER onceward_outbox_counts_truncated ON onceward_outbox;

DROP TRIGGER onceward_outbox_counts_removed ON onceward_outbox;

DROP FUNCTION onceward_count_removed_messages();

DROP TABLE onceward_outbox_tally;
