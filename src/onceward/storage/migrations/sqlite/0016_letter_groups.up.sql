-- What letters that died of the same have in common: a digest of the normalized error. The index serves lists by group.
ALTER TABLE onceward_dead_letters ADD COLUMN error_group TEXT;

CREATE INDEX onceward_dead_letters_by_group
    ON onceward_dead_letters (status, consumer, event_type, error_group, category, died_at, first_failed_at);

CREATE INDEX onceward_dead_letters_ungrouped ON onceward_dead_letters (id) WHERE error_group IS NULL;
