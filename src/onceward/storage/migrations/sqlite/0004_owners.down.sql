ALTER TABLE onceward_dead_letters DROP COLUMN owner;

ALTER TABLE onceward_attempts DROP COLUMN owner;
