ALTER TABLE onceward_dead_letters DROP COLUMN edit_cause;

ALTER TABLE onceward_dead_letters DROP COLUMN edited_by;

ALTER TABLE onceward_dead_letters DROP COLUMN edited_at;

ALTER TABLE onceward_dead_letters DROP COLUMN edited_body;
