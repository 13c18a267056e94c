DROP INDEX onceward_dead_letters_ungrouped;

DROP INDEX onceward_dead_letters_by_group;

ALTER TABLE onceward_dead_letters DROP COLUMN error_group;
