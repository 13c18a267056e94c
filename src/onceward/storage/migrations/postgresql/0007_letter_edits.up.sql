-- A corrected payload, to deliver in place of the body. The body stays as it was delivered.
ALTER TABLE onceward_dead_letters ADD COLUMN edited_body bytea;

ALTER TABLE onceward_dead_letters ADD COLUMN edited_at double precision;

ALTER TABLE onceward_dead_letters ADD COLUMN edited_by text;

ALTER TABLE onceward_dead_letters ADD COLUMN edit_cause text;
